"""What is shipped, and what may import what."""

import ast
import json
import re
import subprocess
import sys
from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

import costmodel
import npinfer
from npinfer.families import FAMILIES

REPO = Path(__file__).parent.parent
PACKAGES = ("npinfer", "costmodel")
EXTRAS = {"gguf", "tokenizers"}  # imported by what needs them, never by an import of the package
TOOLS = {path.stem for path in (REPO / "tools").glob("*.py")}


def declared(section, option):
    """An option of setup.cfg that holds one value a line."""
    parser = ConfigParser()
    parser.read(REPO / "setup.cfg")
    return parser[section][option].split()


# ---- the distribution


@pytest.fixture(scope="module")
def installed():
    """The distribution, whose files are its own: not one that points back to a checkout."""
    try:
        found = distribution("npinfer")
    except PackageNotFoundError:
        pytest.skip("npinfer is not installed: the packages under test are those of a checkout")
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        pytest.skip("npinfer is installed as editable: its files are those of a checkout")
    return found


def test_what_is_installed_is_what_is_tested(installed):
    places = {Path(installed.locate_file(path)).resolve() for path in installed.files}
    for package in (npinfer, costmodel):
        assert Path(package.__file__).resolve() in places


def test_all_modules_and_data_are_installed(installed):
    files = {str(path).replace("\\", "/") for path in installed.files}
    assert {"npinfer/presets.toml", "costmodel/gpus.toml"} <= files
    for package in PACKAGES:
        on_disk = {f"{package}/{path.name}" for pattern in ("*.py", "*.toml") for path in (REPO / package).glob(pattern)}
        assert on_disk <= files


def test_only_the_packages_are_installed(installed):
    tops = {path.parts[0] for path in installed.files if path.suffix in (".py", ".toml")}
    assert tops == set(PACKAGES)


def test_what_is_installed_says_what_it_needs(installed):
    assert installed.version == "".join(declared("metadata", "version"))
    assert "README" not in installed.metadata["Summary"]
    needed = [requirement for requirement in installed.requires if "extra" not in requirement]
    assert sorted(name.partition(">=")[0] for name in needed) == ["numpy", "tabulate"]


def test_declared_packages_are_those_on_disk():
    on_disk = {path.parent.name for path in REPO.glob("*/__init__.py")}
    assert set(declared("options", "packages")) == on_disk == set(PACKAGES)


def test_every_data_file_is_declared():
    patterns = {package: declared("options.package_data", package) for package in PACKAGES}
    for package in PACKAGES:
        data = {path for path in (REPO / package).rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
        shipped = {path for pattern in patterns[package] for path in (REPO / package).glob(pattern)}
        assert data
        assert data <= shipped


def test_nothing_but_numpy_and_tabulate_is_needed():
    assert [line.partition(">=")[0] for line in declared("options", "install_requires")] == ["numpy", "tabulate"]
    assert [line.partition(">=")[0] for line in declared("options.extras_require", "test")] == ["hypothesis", "pytest"]
    extras = declared("options.extras_require", "gguf") + declared("options.extras_require", "hf")
    assert {line.partition(">=")[0] for line in extras} == EXTRAS


# ---- what an import loads


@pytest.fixture(scope="module")
def loaded():
    """Names of the modules that importing the packages loads, beyond those of NumPy itself."""
    code = (
        "import sys, numpy; before = set(sys.modules); import npinfer, costmodel; "
        "print(*sorted(set(sys.modules) - before))"
    )
    path = str(Path(npinfer.__file__).parent.parent)
    code = f"import sys; sys.path.insert(0, {path!r}); {code}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(result.stdout.split())


@pytest.mark.parametrize("name", [*sorted(EXTRAS), "tabulate", "json", "tomllib", "hypothesis", "pytest", "decimal", "argparse"])
def test_an_import_does_not_load(loaded, name):
    """What only some uses need is loaded by those uses: a start takes a fraction of a second."""
    assert "npinfer.model" in loaded
    assert "costmodel.prediction" in loaded
    assert name not in loaded


# ---- what may import what


def imports(path):
    """Top-level names of all modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import; say the package's name"
            yield node.module.partition(".")[0]


def modules(folder):
    paths = sorted((REPO / folder).rglob("*.py"))
    assert paths
    return paths


@pytest.mark.parametrize("path", modules("npinfer"), ids=lambda path: path.name)
def test_npinfer_imports_itself_and_numpy(path):
    assert set(imports(path)) - sys.stdlib_module_names - EXTRAS <= {"npinfer", "numpy"}


@pytest.mark.parametrize("path", modules("costmodel"), ids=lambda path: path.name)
def test_costmodel_imports_npinfer_but_no_program(path):
    assert set(imports(path)) - sys.stdlib_module_names <= {"costmodel", "npinfer", "numpy"}


@pytest.mark.parametrize("path", modules("tools"), ids=lambda path: path.name)
def test_programs_import_the_packages_and_each_other(path):
    assert set(imports(path)) - sys.stdlib_module_names <= {"costmodel", "npinfer", "numpy", "tabulate", *TOOLS}
    assert "tests" not in imports(path)


def test_no_package_is_called_like_a_program():
    # `trace` is also a module of the standard library: a package's `import trace` would mean that one.
    for folder in PACKAGES:
        for path in modules(folder):
            assert not set(imports(path)) & TOOLS


def test_files_named_in_the_readme_exist():
    named = re.findall(r"`((?:npinfer|costmodel|tools|tests)/[\w/.]+)`", (REPO / "README.md").read_text())
    assert len(named) >= 4
    assert [path for path in named if not (REPO / path).exists()] == []


def test_the_readme_names_the_families_that_are_run():
    named = re.search(r"The families are (.*?)\.", (REPO / "README.md").read_text(), re.DOTALL)[1]
    assert re.split(r",\s+|\s+and\s+", named) == list(FAMILIES)


@pytest.mark.parametrize("package, n_least", [(npinfer, 15), (costmodel, 20)], ids=PACKAGES)
def test_the_reading_order_of_a_package_names_its_modules(package, n_least):
    order = re.sub(r"\(.*?\)", "", re.search(r"^Read (.*?)\.$", package.__doc__, re.DOTALL | re.MULTILINE)[1], flags=re.DOTALL)
    named = [word for word in re.findall(r"[a-z_]+", order) if word not in ("and", "then", "with")]
    assert len(named) >= n_least and set(named) <= {path.stem for path in modules(package.__name__)}
