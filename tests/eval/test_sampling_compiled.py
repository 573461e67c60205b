"""Sampling with compiled blocks, traced by Dynamo and run by a backend that counts graphs."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import nn

import zoo
from tests.helpers.sampling import settings
from tests.helpers.tiny_diffusion import tiny_dit, tiny_text_pipeline
from zoo.diffusion.loading import compile_blocks
from zoo.eval.sample_settings import SampleOptions
from zoo.eval.sampling import open_sampler, run_sampling
from zoo.train.denoising.model import save_transformer


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that were compiled; the backend of compilations runs them as they are."""
    found, compiled = [], nn.Module.compile

    def backend(graph, inputs):
        found.append(graph)
        return graph

    monkeypatch.setattr(nn.Module, "compile", lambda module, options: compiled(module, backend=backend))
    torch.compiler.reset()
    yield found
    torch.compiler.reset()


@pytest.mark.parametrize(("mixer", "options"), [("", {}), ("multipole", {"blocks": [2, 2], "radius": 1})])
def test_compiled_blocks_make_the_same_images(mixer, options, graphs, tmp_path):
    model = tiny_dit()
    if mixer:
        zoo.convert(model, mixer, **options)
    save_transformer(model, tmp_path / "model", FlowMatchEulerDiscreteScheduler())
    manner = {"model": str(tmp_path / "model"), "labels": [3, 7], "steps": 3, "guidance": 1.5}
    plain, fast = (open_sampler(SampleOptions(compile=compiled, **manner), "cpu") for compiled in (False, True))
    images = plain(range(2))
    assert not graphs
    made = fast(range(2))
    assert graphs and (made.int() - images.int()).abs().max() <= 1 and made.float().std() > 10
    count = len(graphs)
    assert torch.equal(fast(range(2)), made) and len(graphs) == count  # compiled once, not again each step
    assert plain.metadata() == fast.metadata()  # weights and configuration are not renamed


def test_the_transformer_of_a_pipeline_from_text_is_compiled(graphs, tmp_path):
    folder = tiny_text_pipeline(tmp_path / "pipe")
    (tmp_path / "prompts.txt").write_text("a b c\n")
    options = SampleOptions(model=folder, prompts=str(tmp_path / "prompts.txt"), steps=1, size=16, compile=True)
    assert open_sampler(options, "cpu")(range(1)).shape == (1, 3, 16, 16) and graphs


def test_blocks_that_are_alike_share_a_compilation_and_the_card_says_so(graphs, tmp_path):
    model = tiny_dit(num_layers=6)
    zoo.convert(model, mixer="ahla", keep_softmax="every:2")
    save_transformer(model, tmp_path / "model", FlowMatchEulerDiscreteScheduler())
    sample = {"model": str(tmp_path / "model"), "count": 3, "steps": 2}
    run_sampling(settings(tmp_path / "a.npz", **sample, compile=True), "command")
    assert len(graphs) == 3, "the first block, whose input has other strides, converted ones, softmax ones"
    with pytest.raises(ValueError, match=r"made in another way; they differ in compile$"):
        run_sampling(settings(tmp_path / "a.npz", **(sample | {"count": 4})), "command")


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match=r"sample.compile compiles blocks, and Linear has no list of them"):
        compile_blocks(nn.Linear(2, 2))
