"""Train the click model."""

import numpy as np
import torch
from torch.utils.data import DataLoader

import tiercache as tc
from tests.adoption.dlrm.model import Clicks, DLRM_Net, collate_wrapper

EPOCHS, BATCH = 3, 50
np.random.seed(1)
torch.manual_seed(1)
dlrm = DLRM_Net()
train_ld = DataLoader(Clicks(0, 2000), BATCH, collate_fn=collate_wrapper)
test_ld = DataLoader(Clicks(2000, 500), 250, collate_fn=collate_wrapper)
loss_fn = torch.nn.BCELoss()
optimizer = torch.optim.Adagrad(dlrm.parameters(), lr=0.05)
tc.convert(dlrm, optimizer=optimizer)
data = tc.record_key_sets(dlrm, train_ld, "keys", device_budget="40KiB", call=lambda model, batch: model(*batch[:3]))
cache = tc.TierCache("dlrm.tc", data, model=dlrm, optimizer=optimizer, device_budget="40KiB", host_budget="64MiB")
optimizer, train_ld = cache.optimizer, cache.loader(train_ld, EPOCHS)

for epoch in range(EPOCHS):
    for X, lS_o, lS_i, T in train_ld:
        Z = dlrm(X, lS_o, lS_i)
        E = loss_fn(Z, T)
        optimizer.zero_grad()
        E.backward()
        optimizer.step()
        print("loss", E.item(), flush=True)
    with torch.no_grad():
        dlrm.eval()
        print("test", sum(loss_fn(dlrm(X, lS_o, lS_i), T).item() for X, lS_o, lS_i, T in test_ld))
        dlrm.train()
