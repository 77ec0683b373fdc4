"""`eval`, `exec` and `compile` that take arithmetic and literals only, put in Python's place before an answer is judged.

Verifiers of others evaluate what a model wrote: `eval` for lists, sympy's `parse_expr` for formulas. An answer is refused here
by what it is made of (its syntax tree), before anything of it runs. Imported by path: nothing of megarl.
"""

from __future__ import annotations

import ast
import builtins
import sys
import types
from collections.abc import Container
from typing import Any

_LITERALS = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.Load)
_ARITHMETIC = (ast.UnaryOp, ast.BinOp, ast.unaryop, ast.operator, ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop)

TAKE_TEXT = frozenset(("Symbol", "Integer", "Float", "Rational", "Function"))
"""Names that sympy writes around the names and numbers of a formula; nothing else is called with a text."""
_FUNCTIONS = """
    sin cos tan cot sec csc asin acos atan atan2 acot asec acsc
    sinh cosh tanh coth sech csch asinh acosh atanh acoth asech acsch exp log
    ln sqrt cbrt root Abs sign Min Max Mod floor ceiling factorial binomial gamma beta zeta erf erfc erfi Si Ci Ei li Li
    re im arg conjugate Add Mul Pow pi E I oo zoo nan Heaviside DiracDelta Eq Ne Lt Le Gt Ge And Or Not true false
"""
FORMULAS = TAKE_TEXT | frozenset(_FUNCTIONS.split())
"""Names of sympy that a formula may use."""

# Modules of Python that make classes and modules from text of their own, which no answer reaches.
_OWN_TEXT = frozenset(("collections", "dataclasses", "importlib._bootstrap", "importlib._bootstrap_external", "enum", "typing"))
_SYMPY_NAMES = "from sympy import *"  # sympy fills the names of a formula by this very text


def vet(tree: ast.AST, names: Container[str] = ()) -> None:
    """Refuse an expression that is more than literals, arithmetic, sympy's functions and `names`.

    Raises:
        ValueError: it has a part that is none of these.
    """
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    in_their_place: set[int] = set()  # texts that sympy puts around the names and numbers of a formula
    for call in calls:
        if not isinstance(call.func, ast.Name) or call.func.id not in FORMULAS:
            raise ValueError("an answer may call nothing but functions of mathematics")
        if any(keyword.arg != "evaluate" or not isinstance(keyword.value, ast.Constant) for keyword in call.keywords):
            raise ValueError("an answer may give a function nothing but numbers and formulas")
        if call.func.id in TAKE_TEXT:
            in_their_place.update(id(argument) for argument in call.args)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if node.id not in FORMULAS and node.id not in names:
                raise ValueError(f"an answer may not use the name {node.id}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            if calls and id(node) not in in_their_place:
                raise ValueError("an answer may call no function with a text")
        elif not isinstance(node, (*_LITERALS, *_ARITHMETIC, ast.Call, ast.keyword)):
            raise ValueError(f"an answer may not have a {type(node).__name__}")


def install() -> None:
    """Put the three into builtins, for good."""
    real_eval, real_exec, real_compile = builtins.eval, builtins.exec, builtins.compile
    vetted: set[types.CodeType] = set()

    def caller() -> str:
        return str(sys._getframe(2).f_globals.get("__name__", ""))

    def vetted_compile(source: Any, filename: Any, mode: str, flags: int = 0, *args: Any, **kwargs: Any) -> Any:
        if flags & ast.PyCF_ONLY_AST or caller() in _OWN_TEXT:
            return real_compile(source, filename, mode, flags, *args, **kwargs)
        tree = source if isinstance(source, ast.Expression) else ast.parse(source, mode="eval")
        vet(tree)
        code = real_compile(tree, filename, "eval", flags, *args, **kwargs)
        vetted.add(code)
        return code

    def vetted_eval(source: Any, globals: Any = None, locals: Any = None, /) -> Any:
        if caller() in _OWN_TEXT:
            return real_eval(source, globals, locals)
        if isinstance(source, types.CodeType):
            if source not in vetted:
                raise ValueError("an answer's code may not be evaluated")
            return real_eval(source, globals, locals)
        tree = ast.parse(source.lstrip(" \t") if isinstance(source, str) else source, mode="eval")
        vet(tree, locals if locals is not None else ())
        names = {"__builtins__": {}} if globals is None else globals
        return real_eval(real_compile(tree, "<answer>", "eval"), names, locals)

    def vetted_exec(source: Any, globals: Any = None, locals: Any = None, /, **kwargs: Any) -> None:
        if caller() not in _OWN_TEXT and source != _SYMPY_NAMES:
            raise ValueError("an answer's code may not be executed")
        real_exec(source, globals, locals, **kwargs)

    builtins.compile, builtins.eval, builtins.exec = vetted_compile, vetted_eval, vetted_exec
