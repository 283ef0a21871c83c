"""Optimizers on tensors that two processes share: the same update as on whole ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kit
import pytest
import torch
from ranks import start_ranks

from fivetune import plugins
from fivetune.config import load_config
from fivetune.distributed.sharding import gather_tensor, get_local
from fivetune.distributed.world import World
from fivetune.errors import ConfigError

SHARDING = [
    name
    for name in plugins.list_plugins("optimizers")
    if getattr(plugins.load_plugin("optimizers", name), "supports_shards", False)
]
SHAPES = {"rows": (7, 6), "columns": (4, 10), "vector": (5,), "whole": (3,)}
KINDS = {"rows": "matrix", "columns": "table", "vector": "norm", "whole": "norm"}


def update(name: str, mesh: Any = None) -> tuple[dict[str, torch.Tensor], float | None]:
    """Three steps; with a mesh on shards of different sizes, with one whole tensor among them."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placements = {"rows": Shard(0), "columns": Shard(1), "vector": Shard(0), "whole": Replicate()}
    random = torch.Generator().manual_seed(0)

    def draw(which: str) -> torch.Tensor:
        whole = torch.randn(SHAPES[which], generator=random)
        return distribute_tensor(whole, mesh, [placements[which]]) if mesh and which != "whole" else whole

    options = plugins.load_plugin("optimizers", name)(lr=1e-2, weight_decay=0.1)
    weights = {which: torch.nn.Parameter(draw(which)) for which in SHAPES}
    optimizer = options.build([{"params": [weight], "kind": KINDS[which]} for which, weight in weights.items()])
    for _ in range(3):
        for which, weight in weights.items():
            weight.grad = draw(which)
        optimizer.step()
    state = sum(get_local(v).numel() for one in optimizer.state.values() for v in one.values() if torch.is_tensor(v))
    reached = {which: gather_tensor(weight.detach()) for which, weight in weights.items()}
    return {**reached, "state": torch.tensor(state)}, options.effective_lr(optimizer)


def update_shards(folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    with World.from_environment().connect(cuda=False, timeout_minutes=1) as world:
        mesh = init_device_mesh("cpu", (2,))
        torch.save({name: update(name, mesh) for name in SHARDING}, folder / f"{world.rank}.pt")


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("shared")
    assert [rank.returncode for rank in start_ranks(update_shards, folder)] == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", SHARDING)
def test_shards_are_updated_as_the_whole(shared, name):
    torch.manual_seed(0)
    alone, rate = update(name)
    tolerance = 2e-3 if name == "muon" else 1e-6  # Muon's products are in bf16, its steps have the size of lr
    for reached, found in (of_rank[name] for of_rank in shared):
        assert found == pytest.approx(rate, rel=1e-5)
        for which in SHAPES:
            torch.testing.assert_close(reached[which], alone[which], rtol=0, atol=tolerance)
        if name != "adafactor":  # whose state is small and whole
            assert int(reached["state"]) < 0.8 * int(alone["state"])


def test_an_optimizer_of_whole_tensors_is_refused_by_name(tmp_path, model_folder):
    assert "adamw_8bit" not in SHARDING
    for strategy, several in (("fsdp", 2), ("tensor", 2), ("fsdp_tensor", 4)):
        table = kit.recipe(tmp_path, model_folder, optimizer="adamw_8bit", strategy=strategy, launch__nproc=several)
        with pytest.raises(
            ConfigError,
            match=rf"optimizer\.name adamw_8bit needs whole tensors, and strategy\.name {strategy} divides them\. Use "
            r"another optimizer \(docs/optimizers\.md\), or strategy\.name ddp or pipeline",
        ):
            load_config(table)
    load_config({**table, "strategy": "pipeline"})
