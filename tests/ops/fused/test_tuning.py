"""Files of tuned tiles, and what is refused; without a GPU. Tuning itself is in `children.around`, on a GPU below."""

import json

import pytest
import torch

import hla_kernels as hk
from hla_kernels.hla.fused import Spec, plan
from hla_kernels.hla.fused.plan import tuning
from hla_kernels.hla.fused.spec import widths


@pytest.fixture(autouse=True)
def static():
    yield
    hk.set_tuning(None)


def test_candidates_are_entries_of_the_table():
    for dtype in (torch.bfloat16, torch.float32):
        for spec in (Spec("ahla"), Spec("hla3", feature_map="elu1", normalize=True), Spec("polynomial")):
            w = widths(spec, 72, 72)
            for entry, args in (
                (plan.head_config, ("forward", spec, w, dtype)),
                (plan.reduce_config, (spec, w, dtype)),
                (plan.apply_config, ("backward", spec, w, dtype)),
                (plan.weights_config, (spec, dtype)),
                (plan.middle_config, ("middle", spec, w, 72, 64, plan.precisions(spec, w, dtype, 64, 64))),
            ):
                found = tuning.shipped(entry, args)
                assert entry(*args) in found and len(found) <= 12
                assert all(found.count(config) == 1 for config in found)
    assert len(tuning.shipped(plan.reduce_config, (Spec("ahla"), widths(Spec("ahla"), 64, 64), torch.bfloat16))) > 2


@pytest.mark.parametrize("content", ("[]", "{", '{"a": 1}', '{"a": {"b": {"BN": "x"}}}', '{"a": {"b": 3}}'))
def test_other_files_are_refused(tmp_path, content):
    file = tmp_path / "tuned.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"is no file of hla_kernels\.tune"):
        hk.set_tuning(file)


def test_a_file_is_replaced_class_by_class(tmp_path):
    file = tmp_path / "new" / "tuned.json"
    tuning._write(file, {("a", "apply"): [], ("b", "apply"): []}, {("a", "apply"): {"BN": 64}})
    tuning._write(file, {("a", "apply"): [], ("a", "middle"): []}, {("a", "middle"): {"BR": 16}})
    assert json.loads(file.read_text()) == {"a": {"middle": {"BR": 16}}, "b": {}}
    assert [x.name for x in file.parent.iterdir()] == ["tuned.json"]


def test_what_cannot_be_tuned(tmp_path):
    x = [torch.randn(1, 20, 2, 16) for _ in range(3)]
    for call in (lambda: tuning.search(list), lambda: hk.tune("ahla", *x)):
        with pytest.raises(ValueError, match="call set_tuning"):
            call()
    for other in ("mhla", "taylor2", "multipole", "softmax_attention", hk.ahla):
        with pytest.raises(ValueError, match=r"Unknown operator to tune .*'ahla'"):
            hk.tune(other, *x)
    with pytest.raises(ValueError, match="takes the name of a file or None, got int"):
        hk.set_tuning(3)
    hk.set_tuning(tmp_path / "tuned.json")
    with pytest.raises(ValueError, match="the Triton forms run on CUDA devices"):
        hk.tune("ahla", *x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton forms need a CUDA device: none here")
@pytest.mark.parametrize("sizes", ((32, 4, 197, 64), (2, 4, 1025, 64)), ids=("heads", "split"))
def test_tune(tmp_path, sizes):
    """Tuned calls are no slower by their own timer, within rounding of the others, and read back from the file."""
    b, h, n, d = sizes
    qkv = torch.randn(b, n, 3, h, d, device="cuda", dtype=torch.bfloat16)
    plain = hk.ahla_qkvpacked(qkv, impl="triton")
    hk.set_tuning(tmp_path / "tuned.json")
    found = hk.tune("ahla", qkv)
    assert found.after_ms <= found.before_ms
    ((name, kernels),) = json.loads((tmp_path / "tuned.json").read_text()).items()
    assert torch.cuda.get_device_name() in name and kernels == found.changed
    tuned = hk.ahla_qkvpacked(qkv, impl="triton")
    assert (tuned.float() - plain.float()).norm() <= 1e-2 * plain.float().norm()
    hk.set_tuning(None)
    hk.set_tuning(tmp_path / "tuned.json")
    assert torch.equal(hk.ahla_qkvpacked(qkv, impl="triton"), tuned)
    hk.set_tuning(None)
    assert torch.equal(hk.ahla_qkvpacked(qkv, impl="triton"), plain)
