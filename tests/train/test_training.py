"""What the loop computes: losses, averages, accumulation, processes, learning rates, starting weights, guards."""

import copy
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from timm.utils import ModelEmaV3
from torch import nn

from tests.forks import finish, run_fork, start_two
from tests.helpers.runs import TINY, tiny
from zoo import config
from zoo.conversion.distill import FeatureDistillation
from zoo.models.timm.model_files import load_model, read_recipe
from zoo.train.classification import ClassificationRun, DryClassificationRun, distillation_loss
from zoo.train.dry_run import dry_run
from zoo.train.metrics_log import read_rows
from zoo.train.optim import create_optimizer, create_schedule, parameter_groups
from zoo.train.settings import OptimSettings, ScheduleSettings

STEPS = {"schedule": {"epochs": 1}, "data": {"batch_size": 200}}  # 5 steps
PLAIN = {"augment": {"crop": "none", "label_smoothing": 0.0}}


def weights(folder, name="model.safetensors"):
    return load_file(folder / name)


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a)


# Losses and averages


def test_distillation_loss_is_its_formula():
    rng = np.random.default_rng(0)
    student, teacher, t = rng.normal(size=(7, 5)), rng.normal(size=(7, 5)), 3.0

    def softmax(x):
        e = np.exp(x - x.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    p, q = softmax(teacher / t), softmax(student / t)
    expected = t * t * (p * (np.log(p) - np.log(q))).sum(1).mean()
    found = distillation_loss(torch.tensor(student), torch.tensor(teacher), t)
    assert abs(float(found) - expected) < 1e-6
    assert float(distillation_loss(torch.tensor(teacher), torch.tensor(teacher), t)) < 1e-7


def test_a_student_that_learns_only_from_its_teacher_gets_closer_to_it(tmp_path):
    longer = {"schedule": {"epochs": 6}, "optim": {"lr": 1e-2}}
    ClassificationRun(tiny(tmp_path / "a", **longer)).train()
    distill = {"teacher": str(tmp_path / "a"), "alpha": 1.0}
    trainer = ClassificationRun(tiny(tmp_path / "b", model={"mixer": "la"}, distill=distill, **longer))
    teacher = load_model(tmp_path / "a")[0].eval()
    images = next(iter(trainer.setup.val_images.evaluation(100))).images

    def distance():
        with torch.no_grad():
            return float(distillation_loss(trainer.model.eval()(images), teacher(images), 1.0))

    before = distance()
    trainer.train()
    assert distance() < 0.7 * before


def test_average_of_weights_is_the_recurrence_and_a_loadable_file(tmp_path, monkeypatch, capsys):
    seen = []
    update = ModelEmaV3.update

    def record(self, model, step=None):
        update(self, model, step)
        seen.append({k: v.clone() for k, v in model.state_dict().items()})

    monkeypatch.setattr(ModelEmaV3, "update", record)
    ClassificationRun(tiny(tmp_path, **STEPS, optim={"ema": 0.9, "ema_warmup": False})).train()
    expected = copy.deepcopy(seen[0])  # the first update copies
    for state in seen[1:]:
        expected = {k: 0.9 * expected[k] + 0.1 * state[k] for k in state}
    assert len(seen) == 5
    assert largest_difference(expected, weights(tmp_path, "model_ema.safetensors")) < 1e-6
    model, recipe = load_model(tmp_path)  # of a run that kept an average, that average
    assert largest_difference(model.state_dict(), weights(tmp_path, "model_ema.safetensors")) == 0
    assert "using the EMA weights" in capsys.readouterr().out
    assert recipe.input["size"] == [8, 8] and model.num_classes == 10
    row = [r for r in read_rows(tmp_path / "metrics.jsonl") if r["kind"] == "eval"][-1]
    assert 0 <= row["ema_top1"] <= 100


# One result however the batch is split


def test_accumulation_equals_the_big_batch(tmp_path):
    for parts in (1, 4):
        ClassificationRun(tiny(tmp_path / str(parts), **STEPS, **PLAIN, optim={"grad_accum_steps": parts})).train()
    assert largest_difference(weights(tmp_path / "1"), weights(tmp_path / "4")) < 2e-5


def test_two_processes_equal_two_micro_batches_of_one(tmp_path):
    """Bit for bit, since a mean of two gradients rounds the same wherever it is taken."""
    file = tmp_path / "run.yaml"
    mixer = {"model": {"mixer": "poly"}, "optim": {"ema": 0.9}}
    file.write_text(yaml.safe_dump(config.merge(TINY, {**STEPS, **mixer, "augment": {"label_smoothing": 0.1}})))
    assert run_fork("tools/train_vit.py", str(file), f"run.folder={tmp_path}/one", "optim.grad_accum_steps=2")[0] == 0
    status, out, err = finish(start_two("tools/train_vit.py", str(file), f"run.folder={tmp_path}/two"))
    assert status == 0, err
    for name in ("model.safetensors", "model_ema.safetensors"):
        assert largest_difference(weights(tmp_path / "one", name), weights(tmp_path / "two", name)) == 0
    one, other = (json.loads((tmp_path / run / "result.json").read_text()) for run in ("one", "two"))
    assert one["top1"] == pytest.approx(other["top1"], abs=0.3) and other["images"] == 797
    assert out.count("{") == 1, "only the first process reports"


# Optimiser


def test_new_parameters_get_their_own_rate_and_vectors_no_decay(tmp_path):
    model = ClassificationRun(tiny(tmp_path, model={"mixer": "poly", "mixer_options": {"gate": True}})).model
    optim = OptimSettings(lr=0.1, mixer_lr_scale=10.0, weight_decay=0.3)
    groups = parameter_groups(model, optim)
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    names = {id(p): n for n, p in model.named_parameters()}
    for group in groups:
        for p in group["params"]:
            name = names[id(p)]
            assert group["lr_scale"] == (10.0 if ".mixer." in name else 1.0)
            exempt = p.ndim <= 1 or name == "pos_embed" or name.endswith(".coefficients")
            assert group["weight_decay"] == (0.0 if exempt else 0.3)
    optimizer = create_optimizer(model, optim)
    schedule = create_schedule(optimizer, ScheduleSettings(epochs=10, warmup_epochs=2, warmup_lr=0.0, min_lr=0.0), 10)
    rates = []
    for step in range(100):
        schedule.step_update(step)
        rates.append({g["lr_scale"]: g["lr"] for g in optimizer.param_groups})
    assert rates[0][1.0] == 0.0 and rates[10][1.0] == pytest.approx(0.05) and rates[50][1.0] == pytest.approx(0.05)
    assert all(r[10.0] == pytest.approx(10 * r[1.0]) for r in rates)
    with pytest.raises(ValueError, match=r"unknown optimizer 'adamv'"):
        create_optimizer(model, OptimSettings(name="adamv"))
    for name, betas in (("adamw", [0.9, 0.99, 0.999]), ("adan", [0.9, 0.99])):
        with pytest.raises(ValueError, match=rf"optim\.betas of {name} is "):
            create_optimizer(torch.nn.Linear(2, 2), OptimSettings(name=name, betas=betas))


def test_clipping_is_counted_and_non_finite_steps_are_skipped_then_refused(tmp_path, monkeypatch):
    result = ClassificationRun(tiny(tmp_path / "a", **STEPS, optim={"clip_grad_norm": 1e-6})).train()
    assert result["clipped"] == 5
    poison = {"left": 2}
    original = ClassificationRun.loss

    def loss(self, batch):
        value = original(self, batch)
        poison["left"] -= 1
        return value * float("nan") if poison["left"] >= 0 else value

    monkeypatch.setattr(ClassificationRun, "loss", loss)
    result = ClassificationRun(tiny(tmp_path / "b", **STEPS)).train()
    assert result["skipped"] == 2 and result["skipped_in_a_row"] == 0
    assert all(torch.isfinite(v).all() for v in weights(tmp_path / "b").values())
    poison["left"] = 100
    with pytest.raises(ValueError, match=r"the gradients of 3 steps in a row were not finite"):
        ClassificationRun(tiny(tmp_path / "c", **STEPS, run={"max_nonfinite_steps": 2})).train()


def test_a_new_parameter_without_gradient_stops_the_run(tmp_path):
    trainer = ClassificationRun(tiny(tmp_path, model={"mixer": "la"}))
    trainer.model.blocks[0].attn.mixer.idle = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"receive no gradient: blocks.0.attn.mixer.idle"):
        trainer.train()


# Starting weights


@pytest.fixture(scope="module")
def softmax_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("softmax")
    ClassificationRun(tiny(folder, **STEPS)).train()
    return folder


def start_from(checkpoint, folder, **model):
    return ClassificationRun(tiny(folder, model={"checkpoint": str(checkpoint), **model}))


def test_a_softmax_checkpoint_is_inherited_in_full(softmax_run, tmp_path):
    found = start_from(
        softmax_run, tmp_path, mixer="ahla", mixer_options={"depthwise": "v"}, keep_softmax=[1]
    ).model.state_dict()
    for name, value in weights(softmax_run).items():
        assert torch.equal(found[name], value)
    new = [name for name in found if name not in weights(softmax_run)]
    assert new and all(name.startswith("blocks.0.attn.mixer.") for name in new)


def test_a_run_with_blocks_goes_on_at_another_size(softmax_run, tmp_path):
    """The blocks that were chosen at the first size are part of the checkpoint, so its matrices fit at the second."""
    first = start_from(softmax_run, tmp_path / "a", mixer="mhla")
    first.train()
    _, recipe = load_model(tmp_path / "a")
    found = first.model.blocks[0].attn.mixer
    assert recipe.mixer_options["blocks"] == list(found.blocks)
    more = {"name": "", "kwargs": {}, "img_size": 40, "mixer": "mhla"}
    second = start_from(tmp_path / "a", tmp_path / "b", **more).model.blocks[0].attn
    assert second.grid != first.model.blocks[0].attn.grid and torch.equal(second.mixer.mixing(), found.mixing())
    with pytest.raises(ValueError, match=r"another mixer: it has model.mixer_options \{'blocks'"):
        start_from(tmp_path / "a", tmp_path / "c", **more, mixer_options={"blocks": [1, 1]})


def test_a_teacher_is_the_trained_source_or_refused(softmax_run, tmp_path):
    source = {"teacher": "source"}
    model = {"checkpoint": str(softmax_run), "mixer": "la"}
    trainer = ClassificationRun(tiny(tmp_path / "a", model=model, distill=source))
    taught = trainer.setup.objective.teacher.state_dict()
    assert all(torch.equal(taught[name], value) for name, value in weights(softmax_run).items())
    trainer.train()
    for folder, model, reason in (
        ("b", {"checkpoint": str(tmp_path / "a"), "mixer": "la"}, "already converted"),
        ("c", {"mixer": "la"}, "random weights"),
        ("d", {"checkpoint": str(softmax_run), "reset_classifier": True}, "classifier is new"),
    ):
        with pytest.raises(ValueError, match=reason):
            ClassificationRun(tiny(tmp_path / folder, model=model, distill=source))
    other = {"model": {"img_size": 16}, "distill": {"teacher": str(softmax_run)}}
    with pytest.raises(ValueError, match=r"does not fit the run: its input"):
        ClassificationRun(tiny(tmp_path / "e", **other))


def test_attention_outputs_are_learned_from_the_teacher(softmax_run, tmp_path):
    distill = {"teacher": "source", "alpha": 0.0, "attention": 1.0}
    model = {"checkpoint": str(softmax_run), "mixer": "la"}
    trainer = ClassificationRun(tiny(tmp_path / "a", model=model, distill=distill, schedule={"epochs": 3}))
    trainer.train()
    found = [row["attention"] for row in read_rows(tmp_path / "a" / "metrics.jsonl") if row["kind"] == "train"]
    assert np.mean(found[-4:]) < 0.8 * np.mean(found[:4])
    with pytest.raises(ValueError, match=r"the model has none: set model.mixer"):
        ClassificationRun(tiny(tmp_path / "b", model={"checkpoint": str(softmax_run)}, distill=distill))
    with pytest.raises(ValueError, match=r"which run.compile closes"):
        tiny(tmp_path / "c", distill=distill, run={"compile": True})


def test_final_features_are_learned_from_the_teacher(softmax_run, tmp_path):
    distill = {"teacher": "source", "alpha": 0.0, "features": 2.0}
    model = {"checkpoint": str(softmax_run), "mixer": "la"}
    trainer = ClassificationRun(tiny(tmp_path / "a", model=model, distill=distill, schedule={"epochs": 3}))
    objective, batch = trainer.setup.objective, next(trainer.batches(0, 1))
    with objective.record_outputs():
        logits = trainer.model(batch.images)
    losses = objective(logits, batch.labels, batch.images)
    ours, theirs = (
        m.forward_head(m.forward_features(batch.images), pre_logits=True) for m in (trainer.model, objective.teacher)
    )
    expected = (ours - theirs).square().sum() / theirs.square().sum()
    torch.testing.assert_close(losses["features"], expected)
    torch.testing.assert_close(losses["total"], losses["loss"] + 2 * expected)
    trainer.train()
    found = [row["features"] for row in read_rows(tmp_path / "a" / "metrics.jsonl") if row["kind"] == "train"]
    assert np.mean(found[-4:]) < 0.8 * np.mean(found[:4])
    wider = ClassificationRun(tiny(tmp_path / "b", model={"kwargs": {"embed_dim": 24}})).model
    with pytest.raises(ValueError, match=r"needs a teacher with 16 features, it has 24"):
        FeatureDistillation(trainer.model, wider)
    wider.reset_classifier(0)
    with pytest.raises(ValueError, match=r"one linear classifier, the teacher has a Identity"):
        FeatureDistillation(trainer.model, wider)


def test_the_result_of_a_run_rebuilds_itself(softmax_run, tmp_path):
    trainer = start_from(softmax_run, tmp_path, name="", kwargs={}, img_size=None, mixer="poly", keep_softmax=[0])
    trainer.train()
    model, recipe = load_model(tmp_path)
    assert (recipe.mixer, recipe.keep_softmax, recipe.num_classes, recipe.classes[3]) == ("poly", [0], 10, "3")
    images = next(iter(trainer.setup.val_images.evaluation(50))).images
    with torch.no_grad():
        assert torch.equal(model.eval()(images), trainer.model.eval()(images))
    with pytest.raises(ValueError, match=r"another mixer: it has model\.keep_softmax \[0\], the run \[\]"):
        start_from(tmp_path, tmp_path / "other", mixer="poly")
    again = start_from(tmp_path, tmp_path / "again", mixer="poly", keep_softmax=[0])
    assert largest_difference(again.model.state_dict(), weights(tmp_path)) == 0


@pytest.mark.parametrize("layers", [[-1], "blocks.1.*"])
def test_only_the_layers_that_are_named_are_converted(softmax_run, tmp_path, layers):
    start_from(softmax_run, tmp_path, name="", kwargs={}, img_size=None, mixer="la", layers=layers).train()
    model, recipe = load_model(tmp_path)
    assert recipe.layers == layers and [hasattr(block.attn, "mixer") for block in model.blocks] == [False, True]
    with pytest.raises(ValueError, match=r"another mixer: it has model\.layers"):
        start_from(tmp_path, tmp_path / "other", mixer="la")


def test_timm_weights_without_a_recipe(softmax_run, tmp_path):
    save_file(weights(softmax_run), tmp_path / "timm.safetensors")
    assert read_recipe(tmp_path / "timm.safetensors") is None
    found = start_from(tmp_path / "timm.safetensors", tmp_path / "run", mixer="la").model
    assert torch.equal(found.state_dict()["head.weight"], weights(softmax_run)["head.weight"])
    with pytest.raises(ValueError, match=r"model.name is empty and no checkpoint says which model it is"):
        start_from(tmp_path / "timm.safetensors", tmp_path / "run2", name="")


def test_wrong_checkpoints(softmax_run, tmp_path):
    start_from(softmax_run, tmp_path / "la", mixer="la").train()
    with pytest.raises(ValueError, match=r"checkpoint of another mixer: it has model.mixer 'la', the run 'ahla'"):
        start_from(tmp_path / "la", tmp_path / "1", mixer="ahla")
    with pytest.raises(ValueError, match=r"has model.mixer 'la', the run ''"):
        start_from(tmp_path / "la", tmp_path / "2")
    with pytest.raises(ValueError, match=r"does not fit the model"):
        start_from(softmax_run, tmp_path / "3", kwargs={"depth": 3})
    with pytest.raises(ValueError, match=r"there is no checkpoint .*nowhere"):
        start_from(tmp_path / "nowhere", tmp_path / "4")
    truncated = tmp_path / "cut.safetensors"
    truncated.write_bytes((softmax_run / "model.safetensors").read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"cut.safetensors is truncated or damaged"):
        start_from(truncated, tmp_path / "5")
    (tmp_path / "x.bin").write_bytes(b"1")
    with pytest.raises(ValueError, match=r"checkpoints are .safetensors files"):
        start_from(tmp_path / "x.bin", tmp_path / "6")


def test_class_count_mismatch_and_a_new_head(softmax_run, tmp_path, make_folder):
    images = str(make_folder({"a": 30, "b": 30, "c": 30}))
    data = {"source": "folder", "train": images, "val": images, "batch_size": 30}
    model = {"checkpoint": str(softmax_run), "mixer": "la"}
    with pytest.raises(ValueError, match=r"has 10 classes, but the data has 3; set model.reset_classifier=true"):
        ClassificationRun(tiny(tmp_path / "1", data=data, model=model))
    trainer = ClassificationRun(tiny(tmp_path / "2", data=data, model={**model, "reset_classifier": True}))
    found, source = trainer.model.state_dict(), weights(softmax_run)
    assert found["head.weight"].shape[0] == 3
    assert torch.equal(found["blocks.1.mlp.fc1.weight"], source["blocks.1.mlp.fc1.weight"])


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"name": "vit_tiny_patch16_2244"}, "unknown timm model 'vit_tiny_patch16_2244'"),
        ({"name": "vit_ahla_tiny_patch16_224", "kwargs": {}, "pretrained": True}, "no published weights"),
        ({"name": "vit_tiny_patch16_224.augreg_in21k", "kwargs": {}, "pretrained": True}, "cannot load the weights of"),
        ({"name": "vit_ahla_tiny_patch16_224", "mixer": "la"}, "softmax model, vit_tiny_patch16_224"),
        ({"mixer": "ahhla"}, "Did you mean 'ahla'"),
        ({"mixer": "ahla", "mixer_options": {"gat": True}}, "unknown ahla option 'gat'"),
        ({"kwargs": {"deepness": 3}}, "timm cannot build"),
    ],
)
def test_wrong_model_settings(tmp_path, monkeypatch, model, sentence):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=sentence):
        ClassificationRun(tiny(tmp_path, model=model))


def test_mixup_is_soft_targets_and_needs_even_parts(tmp_path):
    ClassificationRun(tiny(tmp_path / "a", **STEPS, augment={"mixup": 0.8, "cutmix": 1.0})).train()
    with pytest.raises(ValueError, match=r"even number of images per micro-batch, got 25"):
        ClassificationRun(tiny(tmp_path / "b", data={"batch_size": 25}, augment={"mixup": 0.8}))


def test_bfloat16_stays_near_float32(tmp_path):
    base = ClassificationRun(tiny(tmp_path / "a", **STEPS)).train()
    AcceleratorState._reset_state()
    low = ClassificationRun(tiny(tmp_path / "b", **STEPS, run={"precision": "bf16"})).train()
    assert low["loss"] == pytest.approx(base["loss"], abs=0.05)
    assert (
        F.cosine_similarity(weights(tmp_path / "a")["head.weight"], weights(tmp_path / "b")["head.weight"]).min() > 0.9
    )


def test_tensorboard_is_written_when_asked_for(tmp_path):
    pytest.importorskip("tensorboard")
    ClassificationRun(tiny(tmp_path, **STEPS, log={"trackers": ["tensorboard"]})).train()
    assert list(tmp_path.rglob("events.out.tfevents.*"))


def test_a_dry_run_does_one_step_with_a_small_batch(tmp_path, capsys):
    changes = {"data": {"batch_size": 50, "cache": True}, "optim": {"grad_accum_steps": 5, "ema": 0.9}}
    found = dry_run(tiny(tmp_path / "run", **changes, run={"compile": True}), DryClassificationRun)
    assert (found["step"], found["images_seen"], found["images"]) == (1, 4, 2)
    folder = tmp_path / "run-dry-run"
    assert not (tmp_path / "run").exists() and (folder / "checkpoints" / "step-00000001").is_dir()
    said = capsys.readouterr().out
    assert "a batch of 4 (the run has 50), without run.compile, validation on 2, a checkpoint and a resume" in said
    with pytest.raises(ValueError, match="cannot be shared"):
        dry_run(tiny(tmp_path / "run", **changes | {"data": {"batch_size": 51}}), DryClassificationRun)
