"""A process is not a replica, and a replica is not a data shard."""

from __future__ import annotations

from typing import Any

import torch

import spartito as sp
from spartito.system import shares_memory
from tests.replicas import Replicas
from tests.strategies import jobs
from tests.strategies.jobs import blobs, mlp
from tests.strategies.paired import PairedStrategy


def counted(strategy: sp.Strategy) -> int:
    """Bytes that `coordination` counts for one reduction in the data group."""
    reducer = strategy.engine.groups.data.reducer(100, torch.float64, torch.device("cpu"))
    before = strategy.coordination.traffic.sent
    reducer.reduce((1.0,), 1.0)
    return strategy.coordination.traffic.sent - before


def facts() -> dict[str, Any]:
    """Who shares what with whom, and what each reads and gets back."""
    with PairedStrategy() as strategy:
        net = mlp()
        trainer = sp.Trainer(net, loss=torch.nn.CrossEntropyLoss(), strategy=strategy)
        x, y = blobs(3)  # the last batch leaves the second data shard without rows
        read = [len(batch.data[0]) for batch in strategy.distribute(sp.data.arrays(x, y).batch(2))]
        figures = trainer.evaluate((x, y), batch_size=2)
        predicted = trainer.predict(x, batch_size=2)
        return {
            "shard": strategy.data_shard,
            "groups": {name: (g.rank, g.world_size) for name, g in strategy.engine.groups.items()},
            "read": read,
            "loss": figures["loss"],
            "predicted": predicted,
            "sent": counted(strategy),
            "gathered": strategy.gather(torch.tensor([strategy.cluster.rank])).tolist(),
        }


def test_two_processes_of_a_pair_share_a_data_shard(replicas: Replicas) -> None:
    found = replicas(facts, 4)
    net, (x, y) = jobs.mlp(), blobs(3)
    with torch.no_grad():
        output = net(x)
    loss = torch.nn.functional.cross_entropy(output, y).item()
    for rank, one in enumerate(found):
        assert one["shard"] == (rank // 2, 2)
        assert one["groups"] == {
            "world": (rank, 4),
            "data": (rank // 2, 2),
            "replicas": (rank // 2, 2),
            "model": (rank % 2, 2),
        }
        assert one["read"] == [1, 1 - rank // 2]
        assert abs(one["loss"] - loss) < 1e-12
        assert torch.allclose(one["predicted"], output, rtol=0, atol=1e-12)
        assert one["sent"] == (800 if shares_memory() else 808)  # sockets bring a scalar more
        assert one["gathered"] == [rank % 2, rank % 2 + 2]


def drift() -> str:
    """One process of four changes a parameter by itself."""
    with PairedStrategy() as strategy:
        net = mlp()
        trainer = sp.Trainer(
            net,
            optimizer=torch.optim.SGD(net.parameters(), 0.1),
            loss=torch.nn.CrossEntropyLoss(),
            strategy=strategy,
        )
        if strategy.cluster.rank == 3:
            net[0].bias.data += 1e-9  # type: ignore[index]
        try:
            trainer.fit(blobs(8), batch_size=4, verbose=0)
        except sp.UserError as error:
            return str(error)
        return ""


def test_drift_in_one_group_is_told_in_all(replicas: Replicas) -> None:
    for rank, text in enumerate(replicas(drift, 4)):
        assert "have drifted apart: worker 3 has other parameters than worker 1" in text, rank
