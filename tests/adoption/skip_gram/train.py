"""Train skip-gram."""

import torch
from torch.utils.data import DataLoader

import tiercache as tc
from tests.adoption.skip_gram.model import DIM, WORDS, SkipGramModel, Word2vecDataset

EPOCHS = 3
torch.manual_seed(1)
skip_gram_model = SkipGramModel(WORDS, DIM)
dataset = Word2vecDataset()
dataloader = DataLoader(dataset, batch_size=60, shuffle=False, num_workers=0, collate_fn=dataset.collate)
optimizer = torch.optim.SparseAdam(list(skip_gram_model.parameters()), lr=0.01)
tc.convert(skip_gram_model, optimizer=optimizer)
data = tc.record_key_sets(skip_gram_model, dataloader, "keys", device_budget=110000, call=lambda model, b: model(*b))
cache = tc.TierCache("w.tc", data, model=skip_gram_model, optimizer=optimizer, device_budget=110000, host_budget="1GiB")
optimizer, dataloader = cache.optimizer, cache.loader(dataloader, EPOCHS)

for iteration in range(EPOCHS):
    for i, sample_batched in enumerate(dataloader):
        pos_u, pos_v, neg_v = sample_batched
        optimizer.zero_grad()
        loss = skip_gram_model(pos_u, pos_v, neg_v)
        loss.backward()
        optimizer.step()
        print("loss", loss.item(), flush=True)
    with torch.no_grad():
        print("test", skip_gram_model.u_embeddings(torch.arange(0, WORDS, 7)).norm().item(), flush=True)
