"""FSDP2: two processes that each hold a part of the weights end where two that hold all of them end (DDP)."""

import importlib.util
import json
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate import DistributedType
from accelerate.utils import FullyShardedDataParallelPlugin
from PIL import Image
from safetensors.torch import load_file

from tests.forks import finish, start_two
from tests.helpers.runs import MEASURED, TINY, tiny
from zoo import config
from zoo.diffusion.loading import load_transformer
from zoo.train import distributed
from zoo.train.checkpoint import list_checkpoints
from zoo.train.denoising.run import DiffusionRun
from zoo.train.denoising.settings import DiffusionSettings
from zoo.train.distributed import create_accelerator
from zoo.train.metrics_log import read_rows

DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
DIFFUSION = {  # whatever the processes must agree on
    "model": {  # elu1: Adam makes of the rounding of powers, by which processes differ, a thousandth of a step
        "mixer": "mhla",
        "mixer_options": {"mixing": "project", "blocks": [2, 2], "gate": True, "feature_map": "elu1"},
    },
    "distill": {"teacher": "source", "attention": 0.5},
    "optim": {"grad_accum_steps": 2, "mixer_lr_scale": 3.0, "clip_grad_norm": 0.5, "lr": 3e-3, "ema": 0.9},
    "schedule": {"steps": 4},
    "data": {"source": "digits", "img_size": 8, "batch_size": 20, "workers": 0, "cache": True, "val_images": 39},
    "sample": {"every": 2, "count": 4, "steps": 2},
    "run": {"eval_steps": 2, "checkpoint_steps": 2},
    "log": {"every": 1},
}
DEFAULT = {"model": {"mixer_options": {"feature_map": "power", "mixing": "softmax", "gate": False}}}
HOST = {"kwargs": {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8, "patch_size": 2}}
IMAGE = {
    "model": {"mixer": "ahla"},
    "distill": {"teacher": "source", "attention": 0.5},
    "augment": {"mixup": 0.2},
    "optim": {"ema": 0.9, "layer_decay": 0.7, "name": "lamb"},
    "data": {"batch_size": 796},  # of 797 images for validation one process has 399, a part and one more
    "schedule": {"epochs": 2},
}
DIFFUSERS = [f"{part}/diffusion_pytorch_model.safetensors" for part in ("transformer", "transformer_ema")]
IMAGES = ["model.safetensors", "model_ema.safetensors"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the runs below, carried out by two processes."""
    folder = tmp_path_factory.mktemp("sharding")
    jobs = []

    def add(kind, name, sections, **job):
        changes = [{"run": {"folder": str(folder / name)}}, *sections]
        tree = {} if kind == "diffusion" else TINY
        for change in changes:
            tree = config.merge(tree, change)
        jobs.append({"kind": kind, "tree": tree, **job})

    add("diffusion", "source", [DIFFUSION, {"model": {**HOST, "mixer": "", "mixer_options": {}}}], by="ddp")
    jobs[-1]["tree"] |= {"distill": {}, "schedule": {"steps": 2}, "sample": {}}
    start = [DIFFUSION, {"model": {"checkpoint": str(folder / "source")}}]
    for name, by in (("ddp_cut", "ddp"), ("cut", "fsdp2")):
        add("diffusion", name, start, by=by, stop=3, killed=True, poison=[1])
        assert launch(folder, jobs)[0] == -signal.SIGKILL
        assert list_checkpoints(folder / name / "checkpoints") and not (folder / name / DIFFUSERS[0]).exists()
        jobs.clear()
    lora = [*start, {"lora": {"rank": 2}, "run": {"precision": "bf16"}}]
    for name, by in (("ddp", "ddp"), ("fsdp", "fsdp2")):
        add("diffusion", name, start, by=by, poison=[1])
        add("diffusion", f"{name}_lora", lora, by=by)
        add("diffusion", f"{name}_double", [*start, DEFAULT], by=by, double=True)
    for name, by in (("ddp_cut", "ddp"), ("cut", "fsdp2")):
        add("diffusion", name, [*start, {"run": {"resume": True}}], by=by)
    add("diffusion", "rehearsal", start, rehearsed=True)
    for name in ("zero1", "zero2") if DEEPSPEED else ():
        add("diffusion", name, start, by=name, poison=[1])
        add("diffusion", f"{name}_cut", start, by=name, stop=3, poison=[1])
        add("diffusion", f"{name}_cut", [*start, {"run": {"resume": True}}], by=name)
    add("image", "image", [], by="ddp")
    for name, by in (("image_ddp", "ddp"), ("image_fsdp", "fsdp2")):
        add("image", name, [IMAGE, {"model": {"checkpoint": str(folder / "image")}}], by=by)
    status, err = launch(folder, jobs)
    assert status == 0, err
    return folder


def launch(folder, jobs):
    """Carry out the jobs in two processes. (exit status, errors)."""
    (folder / "jobs.yaml").write_text(yaml.safe_dump(jobs))
    status, _, err = finish(start_two("tests/train/sharded.py", str(folder)))
    return status, err


def difference(runs, file, a, b):
    """The largest difference of a weight of two runs."""
    found = [load_file(runs / name / file) for name in (a, b)]
    assert found[0].keys() == found[1].keys()
    return max(float((found[0][k].double() - found[1][k].double()).abs().max()) for k in found[0])


def rows(folder):
    return [{k: v for k, v in row.items() if k not in MEASURED} for row in read_rows(folder / "metrics.jsonl")]


@pytest.mark.parametrize(
    ("files", "a", "b"),
    [(DIFFUSERS, "ddp", "fsdp"), (DIFFUSERS, "ddp_lora", "fsdp_lora"), (IMAGES, "image_ddp", "image_fsdp")],
)
def test_parts_of_the_weights_train_as_whole_ones(runs, files, a, b):
    for file in files:
        assert difference(runs, file, a, b) < 2e-7, file  # a step is 3e-3; measured: 3e-8, an order of summation
    for one, other in zip(rows(runs / a), rows(runs / b), strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert other[key] == (value if isinstance(value, str | None) else pytest.approx(value, rel=1e-4)), key


def test_parts_of_a_default_mixer_train_as_whole_ones(runs):
    """In float64, where the conditioning of powers and of Adam does not show: a step is 3e-3."""
    for file in DIFFUSERS:
        assert load_file(runs / "fsdp_double" / file)["pos_embed.proj.weight"].dtype == torch.float64
        assert difference(runs, file, "ddp_double", "fsdp_double") < 1e-12, file


def test_every_image_for_validation_counts_once(runs):
    assert json.loads((runs / "image_fsdp" / "result.json").read_text())["images"] == 797


@pytest.mark.skipif(not DEEPSPEED, reason="deepspeed is not installed: ZeRO is not checked here")
@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_zero_trains_as_ddp_and_resumes_bit_identically(runs, name):
    for file in DIFFUSERS:
        assert difference(runs, file, "ddp", name) < 2e-7, file
        assert difference(runs, file, name, f"{name}_cut") == 0, file
    last = [[row for row in rows(runs / run) if row["kind"] == "train"][-1] for run in ("ddp", name)]
    assert all(last[0][k] == last[1][k] for k in ("skipped", "clipped_part"))
    settings = config.from_tree(DiffusionSettings, config.read_tree(runs / name / "config.yaml"))
    with pytest.raises(ValueError, match=r"the checkpoint was made by DeepSpeed, in flat parts; continue it as it was"):
        DiffusionRun(replace(settings, run=replace(settings.run, resume=True)))


def test_a_step_that_is_bad_in_one_process_is_skipped_in_all_and_clipping_is_counted(runs):
    last = [row for row in rows(runs / "fsdp") if row["kind"] == "train"][-1]
    assert last["skipped"] == 1 and last["clipped_part"] == pytest.approx(3 / 4)


@pytest.mark.parametrize(("whole", "cut"), [("fsdp", "cut"), ("ddp", "ddp_cut")])
def test_resuming_after_a_kill_is_bit_identical(runs, whole, cut):
    assert all(difference(runs, file, whole, cut) == 0 for file in DIFFUSERS)
    assert rows(runs / whole) == rows(runs / cut)


def test_grids_of_samples_are_those_of_whole_weights(runs):
    for step in (2, 4):
        files = [runs / name / "samples" / f"step-{step:08d}.png" for name in ("ddp", "fsdp")]
        a, b = (torch.tensor(list(Image.open(file).convert("L").tobytes())) for file in files)
        assert (a - b).abs().max() <= 1


def test_adapters_are_saved(runs):
    found = [load_file(runs / name / "adapters.safetensors") for name in ("ddp_lora", "fsdp_lora")]
    assert found[0].keys() == found[1].keys() and any("lora_B" in k for k in found[0])
    assert all(torch.allclose(found[0][k], found[1][k], atol=2e-7) for k in found[0])


def test_two_processes_do_a_dry_run(runs):
    result = json.loads((runs / "rehearsal-dry-run" / "result.json").read_text())
    assert result["step"] == 1 and (runs / "rehearsal-dry-run" / "samples" / "step-00000001.png").is_file()


def test_one_process_goes_on_with_a_checkpoint_of_two(runs, monkeypatch):
    """The checkpoint is that of whole weights: weights, average and the optimiser's state."""
    tree = config.read_tree(runs / "fsdp" / "config.yaml")
    settings = config.from_tree(DiffusionSettings, config.merge(tree, {"run": {"resume": True}}))
    run = DiffusionRun(settings)
    saved = load_transformer(runs / "fsdp" / "transformer_ema").state_dict()
    assert all(torch.equal(v, saved[k]) for k, v in run.ema.module.state_dict().items() if v.is_floating_point())
    state = run.optimizer.state_dict()["state"]
    parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
    assert all(state[i]["exp_avg"].shape == p.shape and int(state[i]["step"]) == 3 for i, p in enumerate(parameters))
    other = torch.load(list_checkpoints(runs / "ddp" / "checkpoints")[-1] / "state.pt", weights_only=True)["optimizer"]
    assert all(torch.allclose(state[i]["exp_avg"], v["exp_avg"], atol=1e-7) for i, v in other["state"].items())


def test_every_family_of_diffusers_is_the_same_in_parts(runs):
    found = json.loads((runs / "families.json").read_text())
    assert {"dit", "pixart", "sana", "sd3", "sd35", "flux", "wan", "wan-i2v"} <= found.keys()
    assert all(output < 1e-6 and gradient < 1e-6 for output, gradient in found.values()), found


REFUSALS = {
    r"configured for FSDP 1; set fsdp_version: 2": ("FSDP", {"fsdp_version": 1}, {}),
    r"fsdp_activation_checkpointing, which loses the token": ("FSDP", {"activation_checkpointing": True}, {}),
    r"FSDP with fsdp_offload_params: true; only false is supported": ("FSDP", {"cpu_offload": True}, {}),
    r"SIZE_BASED_WRAP, which cuts blocks apart": ("FSDP", {"auto_wrap_policy": "size_based_wrap"}, {}),
    r"run.precision=fp16 does not go with sharded weights \(FSDP2\): use bf16": ("FSDP", {}, {"precision": "fp16"}),
    r"configured for Megatron-LM; allowed are FSDP with fsdp_version: 2, DeepSpeed": ("MEGATRON_LM", {}, {}),
    r"DeepSpeed with ZeRO 3; allowed are ZeRO 1 and 2 without offloading, or FSDP": ("DEEPSPEED", {"stage": 3}, {}),
    r"DeepSpeed with offloading; allowed are ZeRO 1 and 2": ("DEEPSPEED", {"stage": 2, "offload": True}, {}),
    r"run.compile does not go with DeepSpeed: leave it out": ("DEEPSPEED", {"stage": 2}, {"compile": True}),
    r"run.precision=fp16 does not go with DeepSpeed: ": ("DEEPSPEED", {"stage": 1}, {"precision": "fp16"}),
}


@pytest.mark.parametrize("sentence", REFUSALS)
def test_what_does_not_go_together_is_refused(tmp_path, monkeypatch, sentence):
    kind, plugin, run = REFUSALS[sentence]
    if kind == "DEEPSPEED":
        asked = {"zero_optimization": {"stage": plugin["stage"]}}
        offloads = SimpleNamespace(is_offload=lambda: "offload" in plugin)
        state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=asked, hf_ds_config=offloads))
    else:
        state = SimpleNamespace(fsdp_plugin=FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **plugin}))
    version_2 = plugin.get("fsdp_version") != 1
    configured = {"distributed_type": DistributedType[kind], "is_fsdp2": version_2, "state": state}
    monkeypatch.setattr(distributed, "Accelerator", lambda **_: SimpleNamespace(**configured))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(ValueError, match=sentence):
        create_accelerator(tiny(tmp_path, run=run))
