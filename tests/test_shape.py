"""Files and classes stay small enough to be read at once."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "poise"
MOST_LINES, MOST_METHODS, MOST_ATTRIBUTES = 399, 19, 11
EXEMPT = {"core/fit.py", "policy/auto.py", "policy/pace.py"}
"""About to be replaced."""
FACADES = {"Balancer"}
"""Their overloads are no methods of their own."""


def files() -> Iterator[tuple[str, str]]:
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name not in EXEMPT:
            yield name, path.read_text()


def mutable_classes(text: str) -> Iterator[ast.ClassDef]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.name not in FACADES:
            decorators = " ".join(ast.unparse(each) for each in node.decorator_list)
            if "frozen=True" not in decorators:
                yield node


def methods(kind: ast.ClassDef) -> list[ast.FunctionDef]:
    return [each for each in kind.body if isinstance(each, ast.FunctionDef)]


def attributes(kind: ast.ClassDef) -> set[str]:
    """What is assigned on self, and the fields of a dataclass."""
    assigned = {
        node.attr
        for method in methods(kind)
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    if any("dataclass" in ast.unparse(each) for each in kind.decorator_list):
        fields = [each.target for each in kind.body if isinstance(each, ast.AnnAssign)]
        assigned |= {each.id for each in fields if isinstance(each, ast.Name)}
    return assigned


def test_files_are_short() -> None:
    long = {name: len(text.splitlines()) for name, text in files()}
    assert {name: lines for name, lines in long.items() if lines > MOST_LINES} == {}


def test_classes_with_mutable_state_are_small() -> None:
    large = {
        f"{name}: {kind.name}": (len(methods(kind)), len(attributes(kind)))
        for name, text in files()
        for kind in mutable_classes(text)
    }
    assert {
        name: size
        for name, size in large.items()
        if size[0] > MOST_METHODS or size[1] > MOST_ATTRIBUTES
    } == {}


def test_a_large_class_is_noticed() -> None:
    text = "class Run:\n    def __init__(self):\n" + "".join(
        f"        self.field_{number} = {number}\n" for number in range(MOST_ATTRIBUTES + 1)
    )
    (kind,) = mutable_classes(text)
    assert len(attributes(kind)) > MOST_ATTRIBUTES


def test_no_class_of_ours_is_patched_and_no_private_is_read_across_packages() -> None:
    """`self._x` and `cls._x` are one's own; a private of an imported module is not."""
    wrong = []
    for name, text in files():
        imported = {
            alias.asname or alias.name
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("poise")
            for alias in node.names
        }
        package = name.split("/")[0]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("poise."):
                theirs = (node.module or "").split(".")[1]
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                if theirs != package and [each for each in private if not each.startswith("__")]:
                    wrong.append(f"{name} imports {private}")
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "Patch"):
                owner = ast.unparse(node.args[0]).split(".")[0] if node.args else ""
                if owner in imported - {"LoaderIterator"}:  # which is torch's own
                    wrong.append(f"{name} replaces something of {owner}")
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                hidden = node.attr.startswith("_") and not node.attr.startswith("__")
                hidden &= node.attr not in ("_fields", "_replace")  # public, of named tuples
                if hidden and node.value.id in imported:
                    wrong.append(f"{name} reads {node.value.id}.{node.attr}")
    assert wrong == []


def test_no_adapter_imports_the_lab() -> None:
    for name, text in files():
        if name.startswith("torch/"):
            assert "poise.lab" not in text, name
