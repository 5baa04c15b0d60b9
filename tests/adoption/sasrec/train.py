"""Train SASRec."""

import numpy as np
import torch
from torch.utils.data import DataLoader

import tiercache as tc
from tests.adoption.sasrec.model import HIDDEN, ITEMS, MAXLEN, SASRec, Sequences, as_arrays

EPOCHS, BATCH = 3, 16
torch.manual_seed(1)
model = SASRec(ITEMS, MAXLEN, HIDDEN)
for _, param in model.named_parameters():
    if param.ndim > 1:
        torch.nn.init.xavier_normal_(param.data)
model.item_emb.weight.data[0, :] = 0
model.pos_emb.weight.data[0, :] = 0
sampler = DataLoader(Sequences(), BATCH, collate_fn=as_arrays)
bce_criterion = torch.nn.BCEWithLogitsLoss()
adam_optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)
tc.convert(model, optimizer=adam_optimizer)
data = tc.record_key_sets(model, sampler, "keys", device_budget="32KiB", call=lambda model, batch: model(*batch))
cache = tc.TierCache("m.tc", data, model=model, optimizer=adam_optimizer, device_budget="32KiB", host_budget="64MiB")
adam_optimizer, sampler = cache.optimizer, cache.loader(sampler, EPOCHS)

for epoch in range(EPOCHS):
    model.train()
    for u, seq, pos, neg in sampler:
        pos_logits, neg_logits = model(u, seq, pos, neg)
        pos_labels, neg_labels = torch.ones(pos_logits.shape), torch.zeros(neg_logits.shape)
        adam_optimizer.zero_grad()
        indices = np.where(pos != 0)
        loss = bce_criterion(pos_logits[indices], pos_labels[indices])
        loss += bce_criterion(neg_logits[indices], neg_labels[indices])
        loss.backward()
        adam_optimizer.step()
        print("loss", loss.item(), flush=True)
    model.eval()
    with torch.no_grad():
        for user in range(0, 400, 100):
            _, seq, pos, _ = as_arrays([Sequences()[user]])
            scores = -model.predict(np.array([user]), seq, np.array([pos[0, -1], *range(1, 101)]))[0]
            print("test", scores.float().mean().item(), flush=True)
