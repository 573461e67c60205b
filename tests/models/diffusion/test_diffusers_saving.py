"""Converted models are saved and loaded by diffusers itself."""

import pytest
import torch
from tiny_diffusers import CASES, converted, host, inputs, run

import zoo


def same(model, again, name) -> bool:
    return torch.equal(run(again, inputs(name)), run(model, inputs(name)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [{}, {"depthwise": "v", "gate": True, "keep_softmax": [1]}])
def test_save_and_load(name, options, tmp_path):
    model = converted(name, "ahla", **options)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.config == model.config or dict(again.config)["conversions"] == model.config.conversions
    assert not any(t.is_meta for t in [*again.parameters(), *again.buffers()]) and same(model, again, name)


@pytest.mark.parametrize("name", CASES)
def test_a_folder_of_the_host_is_converted_on_loading(name, tmp_path):
    wanted = host(name)
    wanted.save_pretrained(tmp_path)
    cls = type(converted(name, "la"))
    again = cls.from_pretrained(tmp_path, conversions=[{"mixer": "hla2", "options": {"gate": True}}])
    zoo.convert(wanted, "hla2", gate=True)
    assert same(wanted, again, name)
    with pytest.raises(ValueError, match=r"holds a .* without mixers"):
        cls.from_pretrained(tmp_path)
    wanted.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is converted already"):
        cls.from_pretrained(tmp_path, conversions=[{"mixer": "la"}])
