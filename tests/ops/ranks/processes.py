"""Processes of a group on this machine, for tests of context parallelism."""

import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.forks import begin_server

Found = dict[str, dict[str, torch.Tensor]]
Shares = dict[str, tuple[int, ...]]


def on_ranks(work: Callable[..., Found], ranks: int, folder: Path, *args: object, device: str = "cpu") -> list[Found]:
    """Run `work(*args)` in `ranks` processes with gloo, or NCCL on GPUs, and return what each of them returned."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begin_server()
    new = device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"  # which triton reads when it is imported
    method = "spawn" if new else "forkserver"
    mp.start_processes(_start, (ranks, port, device, str(folder), work, args), nprocs=ranks, start_method=method)
    return [torch.load(folder / str(rank), weights_only=True) for rank in range(ranks)]


def _start(rank: int, ranks: int, port: int, device: str, folder: str, work: Callable, args: tuple) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch._C._get_accelerator = lambda: torch.device("cpu")  # diffusers asks which kind of device to use
        torch.accelerator.device_count = lambda: ranks
        dist.all_reduce = _as_nccl(dist.all_reduce)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=ranks)
    found = {name: {n: t.cpu() for n, t in tensors.items()} for name, tensors in work(*args).items()}
    torch.save(found, f"{folder}/{rank}")
    dist.destroy_process_group()


def _as_nccl(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Return an all-reduce of gloo that refuses what NCCL refuses."""

    def checked(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not x.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        return all_reduce(x, *args, **kwargs)

    return checked


def gathered(parts: list[torch.Tensor], whole: torch.Tensor) -> torch.Tensor:
    """Join tokens of the ranks, or add shares of the gradient of a tensor that all ranks have."""
    return torch.cat(parts, 1) if whole.dim() == 4 else sum(parts, torch.zeros_like(whole))


def every_case(operate: Callable[..., dict[str, torch.Tensor]], cases: list[str], shares: Shares) -> Found:
    """Run `operate(case, share)` for all cases and shares."""
    return {f"{case}, {name}": operate(case, share) for name, share in shares.items() for case in cases}


def ranks_of(operate: Callable[..., dict[str, torch.Tensor]], cases: Iterable[str], shares: dict[int, Shares]) -> Any:
    """Return a fixture: what each rank found in every case, for each number of ranks."""

    @pytest.fixture(scope="module", params=shares, ids=lambda n: f"{n} ranks")
    def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
        n = request.param
        return on_ranks(every_case, n, tmp_path_factory.mktemp("ranks"), operate, list(cases), shares[n])

    return ranks


def noise(*shape: int, seed: int) -> torch.Tensor:
    """Return normal numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
