"""Diffusion runs: from scratch, from a checkpoint, with a teacher, with adapters; what they write and what they log."""

import copy
import io

import diffusers
import numpy as np
import pytest
import sample
import torch
from PIL import Image

import zoo
from tests.helpers.tiny_runs import tiny
from zoo.conversion.distill import AttentionDistillation, relative_distance
from zoo.conversion.hooks import layers_of
from zoo.diffusion.loading import load_transformer
from zoo.models.diffusers.dit import initialise
from zoo.train.denoising.run import DiffusionRun, DryDiffusionRun
from zoo.train.dry_run import dry_run
from zoo.train.metrics_log import read_rows


@pytest.fixture(scope="module")
def softmax_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("softmax")
    steps = {"schedule": {"steps": 40}, "run": {"eval_steps": 20, "checkpoint_steps": 40}}
    DiffusionRun(tiny(folder, **steps, sample={"every": 40})).train()
    return folder


def converted(source, folder, mixer="la", **sections):
    model = {"checkpoint": str(source), "mixer": mixer}
    return DiffusionRun(tiny(folder, model={"kwargs": {}, **model}, **sections))


def rows(folder, kind):
    return [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == kind]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_fresh_dit_begins_as_the_identity_and_learns(softmax_run):
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8, "sample_size": 8}
    model = diffusers.DiTTransformer2DModel(in_channels=3, num_embeds_ada_norm=10, norm_num_groups=4, **sizes)
    initialise(model)
    x = torch.randn(2, 16, 16)
    t, y = torch.tensor([3, 900]), torch.tensor([1, 2])
    assert torch.equal(model.transformer_blocks[1](x, timestep=t, class_labels=y), x)
    assert model(torch.randn(2, 3, 8, 8), t, y).sample.abs().max() == 0
    losses = [row["val_loss"] for row in rows(softmax_run, "eval")]
    assert losses[1] < losses[0] < 1.6
    assert rows(softmax_run, "train")[-1]["loss"] < 0.75 * rows(softmax_run, "train")[0]["loss"]


def test_the_run_folder_holds_models_that_diffusers_loads(softmax_run):
    raw = diffusers.DiTTransformer2DModel.from_pretrained(softmax_run / "transformer")
    average = diffusers.DiTTransformer2DModel.from_pretrained(softmax_run / "transformer_ema")
    assert not same(raw.state_dict(), average.state_dict())
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(softmax_run / "transformer" / "scheduler")
    assert scheduler.config.shift == 1.0
    assert {"config.yaml", "metrics.jsonl", "result.json", "input.json", "curves.png"} <= {
        p.name for p in softmax_run.iterdir()
    }
    grid = np.asarray(Image.open(softmax_run / "samples" / "step-00000040.png"))
    assert grid.shape == (128, 128, 3) and grid.std() > 0
    assert (np.kron(grid[::8, ::8], np.ones((8, 8, 1), np.uint8)) == grid).all()  # 2 x 2 images of 8 x 8 pixels


def test_labels_are_dropped_for_the_whole_model(softmax_run, tmp_path):
    run = converted(softmax_run, tmp_path, data={"cond_dropout": 1.0})
    seen = []
    for block in run.model.transformer_blocks:
        block.norm1.emb.class_embedder.register_forward_hook(lambda m, args, out: seen.append((args[0].clone(), out)))
    batch = next(run.batches(0, 1))
    run.wrapped.train()
    run.loss(batch)
    table = run.model.transformer_blocks[0].norm1.emb.class_embedder.embedding_table.weight
    assert all((labels == 10).all() for labels, _ in seen)
    assert torch.equal(seen[0][1][0], table[10])


def test_a_softmax_checkpoint_is_inherited_in_full_and_goes_on(softmax_run, tmp_path, capsys):
    options = {"mixer_options": {"depthwise": "v"}, "layers": [0]}
    run = DiffusionRun(
        tiny(
            tmp_path,
            model={"kwargs": {}, "checkpoint": str(softmax_run), "mixer": "ahla", **options},
            optim={"mixer_lr_scale": 5},
        )
    )
    source = load_transformer(softmax_run).state_dict()
    found = run.model.state_dict()
    assert all(torch.equal(found[k], v) for k, v in source.items())
    new = [k for k in found if k not in source]
    assert new and all(k.startswith("transformer_blocks.0.attn1.mixer.") for k in new)
    assert {g["lr_scale"] for g in run.optimizer.param_groups} == {1.0, 5.0}
    run.train()
    again = zoo.HLADiTTransformer2DModel.from_pretrained(tmp_path / "transformer")
    assert same(again.state_dict(), run.model.state_dict())
    for where, weights in ((tmp_path, run.ema.module), (tmp_path / "transformer", run.model)):  # its average by default
        goes_on = DiffusionRun(tiny(tmp_path / f"on {where.name}", model={"kwargs": {}, "checkpoint": str(where)}))
        assert same(goes_on.model.state_dict(), weights.state_dict())
    assert f"{tmp_path}: using {tmp_path / 'transformer_ema'}" in capsys.readouterr().out


def test_the_validation_loss_depends_on_neither_batches_nor_steps(softmax_run, tmp_path):
    found = []
    for size in (20, 7):
        run = converted(softmax_run, tmp_path / str(size), data={"batch_size": size})
        found.append(run.evaluate()["val_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_teacher_is_learned_from(softmax_run, tmp_path):
    """The loss of the data is a constant offset here: what falls is the distance to the teacher."""
    distill = {"teacher": "source", "output": 20.0, "attention": 5.0}
    run = converted(softmax_run, tmp_path, distill=distill, schedule={"steps": 16}, optim={"lr": 5e-3})
    run.train()
    train = rows(tmp_path, "train")
    early, late = (np.mean([[r["distill"], r["attention"]] for r in part], axis=0) for part in (train[:4], train[-4:]))
    assert (late < 0.8 * early).all(), (early, late)
    source = load_transformer(softmax_run).state_dict()
    assert same(run.teacher.model.state_dict(), source)


def test_attention_distance_is_between_the_outputs_of_the_layers(softmax_run):
    model = load_transformer(softmax_run)
    other = copy.deepcopy(model)
    zoo.convert(other, "la")
    names = list(layers_of(model))
    assert names == ["transformer_blocks.0.attn1", "transformer_blocks.1.attn1"]
    match = AttentionDistillation(other, model)
    assert match.names == names
    for which, one in (("student", other), ("teacher", model)):
        with match.record_outputs(which):
            one(torch.randn(2, 3, 8, 8), torch.tensor([5, 9]), torch.tensor([0, 1]))
    assert match.calls["student"][names[0]].output.shape == (2, 16, 16)
    each = [match.calls[w][n].output for n in names for w in ("student", "teacher")]
    by_hand = [((a - b) ** 2).mean() / (b**2).mean() for a, b in zip(each[::2], each[1::2], strict=True)]
    torch.testing.assert_close(match.loss(), torch.stack(by_hand).mean())
    wanted = torch.randn(3, 4)
    assert float(relative_distance(torch.zeros(3, 4), wanted)) == pytest.approx(1.0)
    assert float(relative_distance(wanted * 3, wanted)) == pytest.approx(4.0)


def test_ddpm_learns_variance_and_logs_the_bound(tmp_path):
    DiffusionRun(tiny(tmp_path, objective={"kind": "ddpm"}, sample={"every": 6})).train()
    train = rows(tmp_path, "train")
    assert all(np.isfinite(r["bound"]) and r["bound"] > 0 for r in train)
    model = load_transformer(tmp_path)
    assert model.config.out_channels == 6 and (tmp_path / "samples" / "step-00000006.png").is_file()


def test_gradient_checkpointing_changes_nothing(softmax_run, tmp_path):
    distill = {"teacher": "source", "attention": 0.5}
    models = []
    for on in (False, True):
        model = {"kwargs": {}, "checkpoint": str(softmax_run), "mixer": "la", "gradient_checkpointing": on}
        run = DiffusionRun(tiny(tmp_path / str(on), model=model, distill=distill))
        run.train()
        models.append(run.model.state_dict())
    assert all(torch.allclose(models[1][k], v, atol=1e-6) for k, v in models[0].items())


def test_a_mixer_without_gradient_stops_the_run(softmax_run, tmp_path):
    run = converted(softmax_run, tmp_path)
    run.model.transformer_blocks[0].attn1.mixer.idle = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"receive no gradient: transformer_blocks.0.attn1.mixer.idle"):
        run.train()


def test_adapters_train_few_weights_and_the_saved_model_has_them_merged(softmax_run, tmp_path):
    pytest.importorskip("peft")
    run = converted(softmax_run, tmp_path, lora={"rank": 2}, optim={"lr": 0.05})
    run.model.transformer_blocks[0].attn1.mixer  # noqa: B018
    trained = [n for n, p in run.model.named_parameters() if p.requires_grad]
    mixers = [n for n in trained if ".mixer.phi_" in n]  # the exponents of the feature map
    assert mixers and all("lora_" in n for n in trained if n not in mixers)
    before = {k: v.clone() for k, v in run.model.state_dict().items() if "lora_" not in k and k not in mixers}
    run.train()
    after = run.model.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())
    saved = zoo.HLADiTTransformer2DModel.from_pretrained(tmp_path / "transformer").eval()
    inputs = torch.randn(2, 3, 8, 8), torch.tensor([5, 9]), torch.tensor([0, 1])
    with torch.no_grad():
        wanted = run.model.eval()(*inputs).sample
        assert torch.allclose(saved(*inputs).sample, wanted, atol=1e-5)
        assert not torch.allclose(load_transformer(softmax_run).eval()(*inputs).sample, wanted, atol=1e-3)
    assert (tmp_path / "adapters.safetensors").is_file()


def test_a_dry_run_does_everything_once(softmax_run, tmp_path, capsys):
    model = {"kwargs": {}, "checkpoint": str(softmax_run), "mixer": "hla2"}
    settings = tiny(tmp_path / "run", model=model, distill={"teacher": "source"}, optim={"grad_accum_steps": 5})
    found = dry_run(settings, DryDiffusionRun)
    assert found["step"] == 1 and found["images_seen"] == 4 and found["val_images"] == 2
    assert "one step with a batch of 4 (the run has 20), validation on 2, samples" in capsys.readouterr().out
    folder = tmp_path / "run-dry-run"
    assert not (tmp_path / "run").exists() and (folder / "samples" / "step-00000001.png").is_file()
    assert (folder / "transformer_ema" / "config.json").is_file()
    dry_run(tiny(tmp_path / "run", model=model), DryDiffusionRun)  # a second time in the same place


def test_samples_of_the_teacher_are_data_for_a_conversion(softmax_run, tmp_path):
    options = ["sample.labels=balanced", "sample.steps=2", f"sample.model={softmax_run}/transformer_ema"]
    sample.main([*options, "sample.count=40", f"out={tmp_path}/train"])
    sample.main([*options, "sample.count=20", "sample.seed=1000", f"out={tmp_path}/val"])
    data = {"source": "hf", "train": f"{tmp_path}/train", "val": f"{tmp_path}/val:train", "val_images": 0}
    run = converted(softmax_run, tmp_path / "run", data=data, distill={"teacher": "source"}, schedule={"steps": 2})
    batches = list(run.samples.evaluation(20, 0, 1))
    assert batches[0].condition["class_labels"].tolist() == [i % 10 for i in range(20)]
    wanted = np.stack([np.asarray(Image.open(f"{tmp_path}/val/{i:06d}.png")) for i in range(20)])
    assert np.abs((batches[0].x0.permute(0, 2, 3, 1).numpy() + 1) * 127.5 - wanted).max() < 1e-3
    assert run.train()["step"] == 2
    wrong = {**data, "source": "folder", "train": str(tmp_path), "val": str(tmp_path)}
    with pytest.raises(ValueError, match="was trained with different classes"):
        converted(softmax_run, tmp_path / "run" / "wrong", data=wrong)


def test_tensorboard_gets_the_grid_of_samples(tmp_path):
    """The PNG in the event file is the one in the folder."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    DiffusionRun(tiny(tmp_path, schedule={"steps": 1}, sample={"every": 1}, log={"trackers": ["tensorboard"]})).train()
    events = EventAccumulator(str(tmp_path / "hla-zoo")).Reload()
    (tag,) = events.Tags()["images"]
    (shown,) = events.Images(tag)
    with (
        Image.open(io.BytesIO(shown.encoded_image_string)) as tracked,
        Image.open(tmp_path / "samples" / "step-00000001.png") as written,
    ):
        assert (np.asarray(tracked) == np.asarray(written)).all()
