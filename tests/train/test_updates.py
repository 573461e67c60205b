"""What an update does and does not do: steps that are skipped, schedules, resumed meters, files that are replaced."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import zoo.models.timm.model_files as model_module
from tests.helpers.runs import stop_before, tiny
from zoo.data import LoadedImages, open_source
from zoo.data.settings import AugmentSettings
from zoo.data.sources import Digits
from zoo.data.transforms import InputSpec, train_transform
from zoo.mixers.hla import AHLA
from zoo.models.timm.model_files import Recipe, build, save_weights
from zoo.train.classification import ClassificationRun
from zoo.train.metrics_log import read_rows
from zoo.train.optim import create_schedule
from zoo.train.settings import ScheduleSettings
from zoo.train.update import Updater

SPEC = InputSpec(size=(8, 8), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0)
STEPS = {"schedule": {"epochs": 1}, "data": {"batch_size": 100}}  # 10 steps


def poison(monkeypatch, steps):
    """Make the loss of these steps (counted from 0) not a number."""
    original = ClassificationRun.loss
    monkeypatch.setattr(
        ClassificationRun, "loss", lambda s, batch: original(s, batch) * (float("nan") if s.step in steps else 1.0)
    )


# Skipped steps


@pytest.mark.parametrize(("optimizer", "on_device"), [("adamw", True), ("lamb", False), ("sgd", False)])
def test_a_skipped_step_changes_nothing_and_is_counted(tmp_path, monkeypatch, optimizer, on_device):
    poison(monkeypatch, {0, 3, 4})
    states = []
    update = Updater.__call__

    def record(self, step):
        update(self, step)
        states.append(
            {k: v.clone() for k, v in self.model.state_dict().items()}
            | {
                f"{i}.{k}": v.clone()
                for i, s in enumerate(self.inner.state.values())
                for k, v in s.items()
                if "step" in k
            }
        )

    monkeypatch.setattr(Updater, "__call__", record)
    optim = {"name": optimizer, "clip_grad_norm": 1e-6, "ema": 0.9}
    trainer = ClassificationRun(tiny(tmp_path, **STEPS, log={"every": 4}, optim=optim))
    assert trainer.update.skips_on_device is on_device
    start = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    result = trainer.train()
    assert (result["skipped"], result["skipped_in_a_row"], result["clipped"]) == (3, 0, 7)
    states.insert(0, start)
    for at in range(10):
        same = all(torch.equal(states[at][k], states[at + 1][k]) for k in states[at].keys() & states[at + 1].keys())
        assert same == (at in (0, 3, 4)), at
    rows = [row for row in read_rows(tmp_path / "metrics.jsonl") if row["kind"] == "train"]
    assert [(row["step"], row["skipped"]) for row in rows] == [(4, 2), (8, 3), (10, 3)]
    assert rows[0]["grad_norm"] is None and rows[1]["grad_norm"] > 0
    for name in ("model", "model_ema"):
        assert all(torch.isfinite(v).all() for v in load_file(tmp_path / f"{name}.safetensors").values())


def test_an_optimiser_that_skips_by_itself_is_not_asked_between_log_lines(tmp_path, monkeypatch):
    read = []
    settle = Updater.flush_norms
    monkeypatch.setattr(Updater, "flush_norms", lambda self, step: (read.append(step), settle(self, step))[1])
    ClassificationRun(tiny(tmp_path, **STEPS, log={"every": 4})).train()
    assert sorted(set(read)) == [4, 8, 10]


def test_too_many_skipped_steps_name_the_step_also_when_read_late(tmp_path, monkeypatch):
    poison(monkeypatch, {2, 3, 4})
    settings = tiny(tmp_path, **STEPS, log={"every": 10}, run={"max_nonfinite_steps": 2})
    with pytest.raises(ValueError, match=r"gradients of 3 steps in a row were not finite, last at step 5;"):
        ClassificationRun(settings).train()


@pytest.mark.parametrize("mixing", ["project", "softmax"])
def test_weights_are_projected_after_each_step_and_not_decayed(tmp_path, mixing):
    """A rate far too high for weights that are learned as they are: only those that say so are clipped to [0, 1]."""
    model = {"mixer": "mhla", "mixer_options": {"mixing": mixing, "blocks": [2, 2]}}
    optim = {"lr": 1.0, "weight_decay": 0.1, "ema": 0.5}
    trainer = ClassificationRun(tiny(tmp_path, **STEPS, model=model, optim=optim))
    weights = [p for n, p in trainer.model.named_parameters() if ".mixing." in n]
    groups = [g for g in trainer.optimizer.param_groups for p in g["params"] if any(p is w for w in weights)]
    assert len(weights) == 2 and all(g["weight_decay"] == 0 for g in groups)
    before = [w.detach().clone() for w in weights]
    trainer.train()
    inside = [bool(((w >= 0) & (w <= 1)).all()) for w in weights]
    assert inside == [mixing == "project"] * 2 and not any(map(torch.equal, before, weights))


def test_annealed_layers_become_themselves(tmp_path):
    """Halfway lambda is the ridge; before the last evaluation the layers, also those of the average, are the mixer."""
    run = ClassificationRun(tiny(tmp_path, model={"mixer": "ahla"}, optim={"anneal": 0.8, "ridge": 5.0, "ema": 0.9}))
    layers = [m for model in (run.model, run.ema.module) for m in model.modules() if isinstance(m, AHLA)]
    assert len(layers) == 4 and run.last_step == 10
    for step, first, second in ((0, 5.0, 0.0), (4, 2.5, 0.5), (6, 1.25, 0.75)):
        run.anneal(step)
        for layer in layers:
            torch.testing.assert_close(layer.blend, torch.tensor([first, 0, second, 0]))
    run.train()
    assert all(layer.blend is None for layer in layers)
    plain = {"mixer": "ahla", "checkpoint": str(tmp_path)}  # the average is what its folder holds
    assert ClassificationRun(tiny(tmp_path / "again", model=plain)).evaluate()["top1"] == run.evaluate()["ema_top1"]


def test_a_model_without_higher_orders_cannot_be_annealed(tmp_path):
    with pytest.raises(ValueError, match=r"optim\.anneal is for models with layers of hla2, ahla, hla3"):
        ClassificationRun(tiny(tmp_path, model={"mixer": "la"}, optim={"anneal": 0.5}))
    with pytest.raises(ValueError, match=r"optim\.anneal must be in \[0, 1\), got 1"):
        tiny(tmp_path, optim={"anneal": 1.0})


def test_fp16_is_refused_without_a_gpu(tmp_path):
    if torch.accelerator.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ValueError, match=r"run.precision=fp16 needs a GPU, and there is none here; use bf16 or fp32"):
        ClassificationRun(tiny(tmp_path, run={"precision": "fp16"}))


# Schedules


def rates(epochs=10, **schedule):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = create_schedule(optimizer, ScheduleSettings(epochs=epochs, min_lr=0.0, warmup_lr=0.0, **schedule), 10)
    found = []
    for step in range(10 * epochs):
        scheduler.step_update(step)
        found.append(optimizer.param_groups[0]["lr"])
    return np.array(found)


def test_schedules_are_their_formulas():
    t = np.arange(100)
    np.testing.assert_allclose(rates(name="poly", power=2.0), 0.5 * (1 - t / 100) ** 2, atol=1e-12)
    np.testing.assert_allclose(rates(name="poly"), 0.5 * (1 - t / 100), atol=1e-12)
    np.testing.assert_allclose(rates(name="step", decay_epochs=3, decay_rate=0.5), 0.5 * 0.5 ** (t // 30), atol=1e-12)
    np.testing.assert_allclose(rates(name="constant"), 0.5)
    np.testing.assert_allclose(rates(name="cosine"), 0.25 * (1 + np.cos(np.pi * t / 100)), atol=1e-12)
    warm = rates(name="constant", warmup_epochs=2)
    np.testing.assert_allclose(warm, 0.5 * np.minimum(t / 20, 1))


def test_wsd_stays_and_then_decays_or_asks_for_a_newer_timm():
    try:
        found = rates(name="wsd", warmup_epochs=1, decay_epochs=3)
    except ValueError as error:
        assert "needs a newer timm" in str(error)
        return
    assert np.ptp(found[10:69]) == 0 and found[10] == 0.5
    assert np.all(np.diff(found[70:]) < 0) and found[-1] < 0.05


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        ({"power": 2.0}, r"schedule.power is for schedule.name=poly, not cosine"),
        ({"name": "poly", "decay_epochs": 2.0}, r"schedule.decay_epochs is for schedule.name=step or wsd, not poly"),
        ({"name": "step"}, r"schedule.name=step needs schedule.decay_epochs"),
        ({"name": "step", "decay_epochs": 0.0}, r"schedule.decay_epochs must be a positive number"),
    ],
)
def test_keys_of_another_schedule_are_refused(schedule, sentence):
    with pytest.raises(ValueError, match=sentence):
        ScheduleSettings(**schedule)


# Interrupted runs and files


def test_the_loss_of_a_line_spans_an_interruption(tmp_path, monkeypatch):
    settings = {**STEPS, "log": {"every": 4}, "run": {"checkpoint_steps": 3}}
    ClassificationRun(tiny(tmp_path / "whole", **settings)).train()
    with monkeypatch.context() as patched:
        stop_before(patched, 6)  # between the lines of steps 4 and 8
        with pytest.raises(KeyboardInterrupt):
            ClassificationRun(tiny(tmp_path / "cut", **settings)).train()
    ClassificationRun(tiny(tmp_path / "cut", **{**settings, "run": {"checkpoint_steps": 3, "resume": True}})).train()
    losses = [
        [
            (r["step"], r["loss"], r["grad_norm"])
            for r in read_rows(tmp_path / run / "metrics.jsonl")
            if r["kind"] == "train"
        ]
        for run in ("whole", "cut")
    ]
    assert losses[0] == losses[1] and [row[0] for row in losses[0]] == [4, 8, 10]


def test_weights_are_written_in_full_or_not_at_all(tmp_path, monkeypatch):
    recipe = Recipe("vit_tiny_patch16_224", {"depth": 1, "embed_dim": 12, "num_heads": 1}, num_classes=2)
    model, file = build(recipe), tmp_path / "model.safetensors"
    save_weights(model, recipe, file)
    before = file.read_bytes()

    def torn(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(model_module, "save_file", torn)
    with pytest.raises(OSError, match="no space left"):
        save_weights(model, recipe, file)
    assert file.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "model.safetensors"]


# Validation


def test_the_model_and_its_average_share_one_reading_of_the_images(tmp_path, monkeypatch):
    trainer = ClassificationRun(tiny(tmp_path, data={"cache": False}, optim={"ema": 0.9}))
    read = []
    original = Digits.read
    monkeypatch.setattr(Digits, "read", lambda self, index: (read.append(index), original(self, index))[1])
    with torch.no_grad():
        for p in trainer.ema.module.parameters():
            p.zero_()
    row = trainer.evaluate()
    assert sorted(read) == list(range(797))
    assert row["ema_loss"] == pytest.approx(np.log(10), abs=1e-5) and row["ema_loss"] != row["loss"]


def test_validation_keeps_its_loader_processes():
    images = LoadedImages(open_source("digits", "", False), SPEC, AugmentSettings(), 0, torch.device("cpu"), 1)
    first = [batch.images for batch in images.evaluation(200)]
    workers = [p.pid for p in images._evaluation[1]._iterator._workers]
    second = [batch.images for batch in images.evaluation(200)]
    assert [p.pid for p in images._evaluation[1]._iterator._workers] == workers
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and len(first) == 4
    assert sum(len(batch.images) for batch in images.evaluation(200, 1, 2)) == 398  # another share, other processes


# Another image size


@pytest.mark.parametrize("class_token", [False, True])
def test_positions_are_interpolated_to_another_image_size(tmp_path, class_token, capsys):
    kwargs = {"class_token": class_token, "global_pool": "token" if class_token else "avg"}
    ClassificationRun(tiny(tmp_path / "small", model={"kwargs": kwargs})).train()
    model = {"name": "", "kwargs": {}, "checkpoint": str(tmp_path / "small"), "img_size": 16, "mixer": "la"}
    trainer = ClassificationRun(tiny(tmp_path / "large", model=model))
    assert "position embeddings resampled from 4 x 4 to 8 x 8" in capsys.readouterr().out
    found, stored = trainer.model.state_dict(), load_file(tmp_path / "small" / "model.safetensors")
    assert all(torch.equal(found[k], v) for k, v in stored.items() if k != "pos_embed")
    prefix = int(class_token)
    grid = stored["pos_embed"][:, prefix:].reshape(1, 4, 4, 16).permute(0, 3, 1, 2)
    expected = F.interpolate(grid, size=(8, 8), mode="bicubic", antialias=True).flatten(2).transpose(1, 2)
    torch.testing.assert_close(found["pos_embed"][:, prefix:], expected)
    assert torch.equal(found["pos_embed"][:, :prefix], stored["pos_embed"][:, :prefix])
    assert trainer.train()["images"] == 797 and trainer.setup.recipe.img_size == 16


# Augmentation


def test_the_policies_of_the_recipes_run_at_their_highest_level():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))
    for policy in ("rand-m10-n4-inc1-p1", "original"):
        transform = train_transform(SPEC, AugmentSettings(auto_augment=policy))
        assert all(transform(image).shape == (3, 8, 8) for _ in range(100))
