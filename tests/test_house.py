"""The rules of the house, enforced: who may import whom, sizes of files and folders, what the wheel contains."""

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forks import ROOT, run_fork

SOURCES = ["kernels/hla_kernels", "zoo", "tools", "tests"]
MAY_IMPORT = {
    "kernels/hla_kernels": {"torch", "triton", "hla_kernels"},
    "zoo": {
        *("hla_kernels", "zoo", "torch", "timm", "diffusers", "accelerate", "torchvision", "einops", "safetensors"),
        *("numpy", "yaml", "tqdm", "matplotlib", "sklearn", "datasets", "webdataset", "PIL", "peft"),
        *("torch_fidelity", "av", "pyarrow"),
    },
}

LAYERS = (  # of zoo, lowest first: a package may import those of the lines above its own
    ("errors", "files", "io", "plotting", "precision", "config", "ranges", "grid", "progress"),
    ("mixers",),
    ("models",),
    ("conversion", "data"),
    ("diffusion",),
    ("eval",),
    ("train",),
    ("recipes",),
    ("cli",),
)


PLAIN_ENGLISH = (  # folders and files whose language is checked; to be extended as others are rewritten
    *("zoo", "tools", "tests/mixers", "tests/models", "tests/conversion", "tests/benchmarks", "tests/helpers"),
    "kernels/hla_kernels",
)
MEASURED = "operations|multiplications|parameters|numbers?|bytes|images|samples|seconds|ms|frames|pixels|weights|gates?"
UNITS = "head|token|step|image|sample|GPU|layer|channel|second|side|process|row|axis|block|query|class|video|device"
A_FOR_PER = re.compile(rf"\b({MEASURED}) an? ([a-z]+ )?({UNITS})\b")  # "operations a head": write "per head"
TWO_UNITS = re.compile(r"\boperations per head\b")  # README and mixers count multiplications
UNCLEAR = re.compile(
    r"\b(besides?|told|hears?|heard|wants?|wanted|knows?|turned|at first|side by side|goes on|the same of|that of|"
    r"those of|of its own|is said|says? so|takes? the place|in the place of)\b"
)
SHARED_NAMES = {
    *("default_cfgs", "T", "B"),  # timm requires the first in every file of models; the others are type variables
    *("main", "USAGE"),  # of each command
    *("load", "save"),  # of models in zoo, of configurations in zoo.config
    "KINDS",  # of names in zoo.cli.listing, of transformers in zoo.train.denoising.settings
}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def files(folder: str) -> list[Path]:
    place = ROOT / folder
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports."""
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_arrows_point_one_way(folder):
    for path in files(folder):
        foreign = imported(path) - MAY_IMPORT[folder] - set(sys.stdlib_module_names)
        assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


def parts_of_zoo(path: Path) -> set[str]:
    """What a file imports of zoo, inside functions too; `import zoo` itself stands for its models."""
    found = set()
    for node in ast.walk(parsed(path)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"zoo.{alias.name}" for alias in node.names] if node.module == "zoo" else [node.module]
        found |= {f"{name}.models".split(".")[1] for name in names if name.split(".")[0] == "zoo"}
    return found


def test_packages_of_zoo_import_only_lower_ones():
    level = {name: number for number, names in enumerate(LAYERS) for name in names}
    parts = {path.relative_to(ROOT / "zoo").parts[0].removesuffix(".py") for path in files("zoo")}
    assert parts - {"__init__"} == level.keys()
    for path in files("zoo"):
        own = path.relative_to(ROOT / "zoo").parts[0].removesuffix(".py")
        below = {name for name in level if level[name] < level.get(own, level["conversion"])}
        allowed = below | {own} | (set(LAYERS[0]) if own in LAYERS[0] else set())
        assert parts_of_zoo(path) <= allowed, f"{path.relative_to(ROOT)} imports {parts_of_zoo(path) - allowed}"


@pytest.mark.parametrize("folder", SOURCES)
def test_files_and_folders_stay_small(folder):
    for path in files(folder):
        lines = len(path.read_text().splitlines())
        limit = 80 if path.parent == ROOT / "tools" else 400
        assert lines <= limit, f"{path.relative_to(ROOT)} has {lines} lines, more than {limit}"
    folders = {p.parent for p in files(folder)}
    for place in folders:
        entries = [p for p in place.iterdir() if p.name[0] != "." and (p.is_file() or any(p.rglob("*.py")))]
        most = 40 if place == ROOT / "zoo" / "mixers" else 20  # one file per mixer
        assert len(entries) <= most, f"{place.relative_to(ROOT)} has {len(entries)} entries, more than {most}"


def test_kernels_of_two_sided_operators_stay_few():
    assert sum(len(path.read_text().splitlines()) for path in files("kernels/hla_kernels/hla/fused")) <= 4500


def test_public_functions_have_docstrings():
    for folder in MAY_IMPORT:
        for path in files(folder):
            tree = parsed(path)
            assert ast.get_docstring(tree), f"{path.relative_to(ROOT)} has no docstring"
            for node in tree.body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                    assert ast.get_docstring(node), f"{path.relative_to(ROOT)}: {node.name} has no docstring"


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every docstring, error message and comment of a file."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and (doc := ast.get_docstring(node)):
            yield node.body[0].lineno, " ".join(doc.split())
        if isinstance(node, ast.Raise):
            texts = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))
            yield node.lineno, " ".join(texts)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.mark.parametrize("folder", PLAIN_ENGLISH)
def test_plain_english(folder):
    for path in files(folder):
        for line, text in prose(path):
            for pattern in (A_FOR_PER, TWO_UNITS, UNCLEAR):
                match = pattern.search(text)
                assert match is None, f"{path.relative_to(ROOT)}:{line}: {match[0]!r} is not plain English: {text}"


@pytest.mark.parametrize("folder", [*PLAIN_ENGLISH, "kernels/hla_kernels"])
def test_modules_have_short_titles(folder):
    for path in files(folder):
        title = re.split(r"\.(?:\s|$)", ast.get_docstring(parsed(path)) or "")[0]
        assert len(title) <= 100, f"{path.relative_to(ROOT)}: the first sentence has {len(title)} characters"


def test_types_are_named():
    """`Any` is for values that no type describes: less than a hundred lines."""
    lines = [line for path in files("zoo") for line in path.read_text().splitlines() if re.search(r"\bAny\b", line)]
    assert len([line for line in lines if "import" not in line]) < 100


@pytest.mark.parametrize("phrase", ["numbers a head", "images an optimizer step", "what it is told", "that of q"])
def test_unclear_phrases_are_found(phrase):
    assert A_FOR_PER.search(phrase) or UNCLEAR.search(phrase)


def test_public_names_are_unique():
    places = defaultdict(set)
    for path in (p for folder in PLAIN_ENGLISH if folder.startswith("zoo") for p in files(folder)):
        for node in parsed(path).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [t.id for t in targets if isinstance(t, ast.Name)]
            names += [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            for name in names:
                places[name].add(str(path.relative_to(ROOT)))
    public = {n: sorted(p) for n, p in places.items() if n[0] != "_" and n not in SHARED_NAMES and len(p) > 1}
    assert not public, f"names with several definitions: {public}"


def test_kernels_is_a_plain_folder():
    assert not (ROOT / "kernels" / "__init__.py").exists(), "kernels/ must not become a package: the name is taken"


def test_the_wheel_holds_exactly_the_two_packages(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"zoo", "hla_kernels"}
    assert {"hla_kernels/py.typed", "zoo/py.typed"} <= set(names)
    shipped = {name.removeprefix("zoo/configs/") for name in names if name.startswith("zoo/configs/")}
    assert shipped == {str(p.relative_to(ROOT / "configs")) for p in (ROOT / "configs").rglob("*.yaml")}


def test_no_pickle_from_disk():
    for folder in SOURCES[:3]:
        for path in files(folder):
            tree = parsed(path)
            for node in ast.walk(tree):
                named = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
                assert named not in ("pickle.load", "pickle.loads", "pickle.Unpickler"), f"{path.name}: {named}"
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                    safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
                    assert safe, f"{path.relative_to(ROOT)}:{node.lineno} loads without weights_only=True"


def test_readme_tables_are_those_of_the_result_files():
    status, out, err = run_fork("docs/readme_tables.py", "--check")
    assert status == 0, out + err


def launched(node: ast.AST) -> bool:
    """Whether this is kernel[grid](...)."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)):
        return False
    grid = node.func.slice
    return ast.unparse(node.func.value) != "dict" and (isinstance(grid, ast.Tuple) or ast.unparse(grid) == "grid")


def test_one_place_launches_kernels():
    """The one that says how sums of products are rounded, which versions of Triton do not agree about."""
    found = {p.name for p in files("kernels/hla_kernels") if any(map(launched, ast.walk(parsed(p))))}
    assert found == {"recording.py"}


def test_no_test_imports_a_test():
    """What tests share has a place of its own, such as tests/helpers, and is imported by its full name."""
    bare = {path.stem for path in files("tests")} - set(sys.stdlib_module_names)
    for path in files("tests"):
        names = imported(path) & bare
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
                modules = [*node.module.split("."), *(alias.name for alias in node.names)]
                names |= {name for name in modules if name.startswith("test_") or name == "conftest"}
        assert not names, f"{path.relative_to(ROOT)} imports {sorted(names)}"
