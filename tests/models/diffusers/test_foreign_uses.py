"""Uses from diffusers' test suites: dynamic compilation, full graphs, processors, device maps."""

import diffusers
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch._dynamo.testing import CompileCounterWithBackend

import zoo
from tests.helpers.tiny_diffusers import close, converted, host, inputs, run, sites
from zoo.models.diffusers.joint import estimate_log_partition


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def frames(model, name):
    """How many graphs two sizes of images make."""
    counter = CompileCounterWithBackend("eager")
    fast = torch.compile(model, backend=counter, dynamic=True)
    for size in (8, 12):
        close(run(fast, inputs(name, size=size)), run(model, inputs(name, size=size)))
    return counter.frame_count


def test_the_mass_of_any_number_of_keys_is_one_graph():
    counter = CompileCounterWithBackend("eager")
    fast = torch.compile(estimate_log_partition, backend=counter, dynamic=True, fullgraph=True)
    for n in (8, 12, 31):
        q, k = torch.randn(2, 2, n, 3, 4).double()
        torch.testing.assert_close(fast(q, k, 0.5), estimate_log_partition(q, k, 0.5))
    assert counter.frame_count == 1


def test_joint_attention_compiles_for_every_size_at_once():
    model = converted("sd3", "la", config={"num_layers": 2})
    assert frames(model, "sd3") <= 2  # the tables of positions of the host cost the second


def test_ltx_compiles_into_one_graph():
    model = converted("ltx", "la", config={"num_layers": 1}, depthwise="v")
    close(run(torch.compile(model, fullgraph=True, backend="eager"), inputs("ltx")), run(model, inputs("ltx")))


def test_a_given_grid_lets_flux_compile_and_export_with_mixers_of_the_grid():
    short = {"num_layers": 1, "num_single_layers": 1}
    model, arguments = converted("flux", "ahla", config=short, depthwise="v"), inputs("flux")
    wanted = run(model, arguments)
    model.give_grid(4, 6)
    assert torch.equal(run(model, arguments), wanted)
    close(run(torch.compile(model, fullgraph=True, backend="eager"), arguments), wanted)
    program = torch.export.export(model, (), {**arguments, "return_dict": False})
    close(program.module()(**arguments, return_dict=False)[0], wanted)
    model.give_grid(5, 6)
    with pytest.raises(ValueError, match=r"the grid 5 x 6 .* needs 30 tokens, got 24"):
        run(model, arguments)


CHANGES = [lambda ids: ids.flip(0), lambda ids: ids.roll(7, 0), lambda ids: -ids, lambda ids: ids[:, [0, 2, 1]]]


@pytest.mark.parametrize("change", CHANGES)
def test_unordered_ids_are_one_sentence(change):
    arguments = inputs("flux")
    arguments["img_ids"] = change(arguments["img_ids"])
    with pytest.raises(ValueError, match="img_ids are not the raster of one image"):
        run(converted("flux", "ahla", depthwise="v"), arguments)


@pytest.mark.parametrize("name", ["sd3", "sana"])
def test_a_processor_of_another_attention_is_refused_for_what_it_is(name):
    for processor in (AttnProcessor(), AttnProcessor2_0()):
        kind = type(processor).__name__
        with pytest.raises(ValueError, match=rf"^{kind} computes another attention than this kind of layer has"):
            sites(converted(name, "la"))[0].set_processor(processor)


@pytest.mark.parametrize("name", ["dit", "pixart", "sana", "wan", "sd3", "flux"])
def test_models_can_be_spread_over_devices(name, tmp_path):
    """Blocks are never split, so that a residual stream stays on one device."""
    model = converted(name, "ahla")
    blocks = {type(b).__name__ for part in model.children() if isinstance(part, torch.nn.ModuleList) for b in part}
    assert blocks <= set(model._get_no_split_modules("auto"))
    model.save_pretrained(tmp_path)
    spread = type(model).from_pretrained(tmp_path, device_map="auto", max_memory={"cpu": "1GB"})
    close(run(spread, inputs(name)), run(model, inputs(name)))


def test_from_pipe_takes_the_converted_model_by_name():
    """diffusers hands parts on by itself only where they are of the very class that the new pipeline expects."""
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)
    pipe = diffusers.DiTPipeline(host("dit"), vae, diffusers.DDIMScheduler())
    zoo.convert(pipe, "ahla")
    again = diffusers.DiTPipeline.from_pipe(pipe, transformer=pipe.transformer)
    assert again.transformer is pipe.transformer
