"""Train DeepFM."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import tiercache as tc
from tests.adoption.deepfm.model import DeepFM, samples

EPOCHS, BATCH = 3, 40
torch.manual_seed(1)
model = DeepFM()
train_loader = DataLoader(samples(0, 2000), batch_size=BATCH, shuffle=False)
test_loader = DataLoader(samples(2000, 400), batch_size=200)
optim = torch.optim.Adagrad(model.parameters(), lr=0.05)
tc.convert(model, optimizer=optim)
data = tc.record_key_sets(model, train_loader, "keys", device_budget="26KiB", call=lambda model, batch: model(batch[0]))
cache = tc.TierCache("clicks.tc", data, model=model, optimizer=optim, device_budget="26KiB", host_budget="64MiB")
optim, train_loader = cache.optimizer, cache.loader(train_loader, EPOCHS)

for epoch in range(EPOCHS):
    model.train()
    for x_train, y_train in train_loader:
        y_pred = model(x_train).squeeze()
        optim.zero_grad()
        loss = F.binary_cross_entropy(y_pred, y_train.squeeze(), reduction="sum")
        total_loss = loss + model.get_regularization_loss()
        total_loss.backward()
        optim.step()
        print("loss", total_loss.item() / len(y_train), flush=True)
    model.eval()
    with torch.no_grad():
        print("test", sum(F.binary_cross_entropy(model(x), y).item() for x, y in test_loader), flush=True)
