"""Train RotatE."""

import torch

import tiercache as tc
from tests.adoption.rotate.model import DIM, ENTITIES, RELATIONS, BidirectionalLoader, KGEModel, TrainDataset

EPOCHS = 3
torch.manual_seed(1)
kge_model = KGEModel(ENTITIES, RELATIONS, DIM, gamma=6.0)
train_iterator = BidirectionalLoader(50)
optimizer = torch.optim.Adagrad(filter(lambda p: p.requires_grad, kge_model.parameters()), lr=0.05)
tc.convert(kge_model, optimizer=optimizer, parameters=["entity_embedding", "relation_embedding"])
data = tc.record_key_sets(
    kge_model,
    lambda: BidirectionalLoader(50),
    "keys",
    device_budget="36KiB",
    call=lambda model, batch: (model((batch[0], batch[1]), mode=batch[3]), model(batch[0])),
)
cache = tc.TierCache("graph.tc", data, model=kge_model, optimizer=optimizer, device_budget="36KiB", host_budget="64MiB")
optimizer, train_iterator = cache.optimizer, cache.loader(lambda: BidirectionalLoader(50), EPOCHS)

for epoch in range(EPOCHS):
    for batch in train_iterator:
        log = kge_model.train_step(kge_model, optimizer, batch)
        print("loss", log, flush=True)
    kge_model.eval()
    with torch.no_grad():
        for i in range(0, 2000, 500):
            positive_sample, *_ = TrainDataset.collate_fn([TrainDataset("tail-batch")[i]])
            score = kge_model((positive_sample, torch.arange(ENTITIES)[None]), "tail-batch")
            print("test", score.mean().item(), flush=True)
