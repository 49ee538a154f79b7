"""Loading in shards is not supported, and says so before anything is made of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_qmoe import QMoEConfig
from tests.support.checkpoints import load


_SCRIPT = """
import sys

import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())

from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_qmoe import QMoEConfig

path, packed, *sizes = sys.argv[1:]
config = {} if packed == "packed" else {"quantization_config": QMoEConfig()}
distributed = DistributedConfig(**{size.split("=")[0]: int(size.split("=")[1]) for size in sizes})
try:
    AutoModelForCausalLM.from_pretrained(path, distributed_config=distributed, **config)
except NotImplementedError as error:
    print(error)
"""


@pytest.mark.parametrize("source", ["float", "packed"])
@pytest.mark.parametrize("sizes", [["tp_size=2"], ["fsdp_size=2", "ep_size=2"]], ids=str)
def test_loading_in_shards(tiny_checkpoints: dict[str, Path], tmp_path: Path, source: str, sizes: list[str]) -> None:
    path = tiny_checkpoints["qwen3_moe"]
    if source == "packed":
        load(path, QMoEConfig()).save_pretrained(tmp_path / "packed")
        path = tmp_path / "packed"
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    environment = os.environ | ranks | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    command = [sys.executable, "-c", _SCRIPT, str(path), source, *sizes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "load it whole on each rank" in done.stdout, done.stderr[-2000:]
