"""Find what in a file needs `--modernize` or `--device cpu`, and what will not work."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Iterator

from apex_mp._as_apex.sources import Call, Source, Use, is_of_apex, places_of
from apex_mp._as_apex.table import MISSING, MODULES
from apex_mp._run.modernize import packages
from apex_mp._run.modernize.names import DROPPED, REPLACED
from apex_mp._run.modernize.source import OF_DATA

_SUPPLIED: dict[str, set[str]] = {
    module: {*names} for module, names in [*DROPPED.items(), *packages.NAMES.items()]
}
_SUPPLIED["torch"] |= {*REPLACED}
_MASKED = re.compile(r"masked_(fill|scatter|select)_?")
_BYTES = ("torch.uint8", "torch.ByteTensor", "torch.cuda.ByteTensor")
_CASTS = ("half", "bfloat16")
_CASTING = (*_CASTS, "to", "from_pretrained")
_16_BITS = {"float16", "half", "bfloat16"}
# In `x.half()` it is inputs that are cast.
_MODEL = re.compile(r"model|net|transformer|coder|module|policy|actor", re.IGNORECASE)
_VIEWS = {
    "view",
    "view_as",
    "reshape",
    "t",
    "transpose",
    "narrow",
    "select",
    "squeeze",
    "unsqueeze",
}
# Methods that PIL, matplotlib and transformers have dropped.
_METHODS = ("textsize", "tostring_rgb", "encode_plus", "batch_encode_plus")
_SAMPLERS = {"torch.utils.data.Sampler", "torch.utils.data.sampler.Sampler"}
_GPU_WORDS = re.compile(r"cuda(:\d+)?|nccl")
# Modules of apex that are not about mixed precision, and what to use instead.
_ELSEWHERE = {
    "apex.contrib.clip_grad": "torch.nn.utils.clip_grad_norm_",
    "apex.contrib.fmha": "torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.groupbn": "apex_mp.parallel.SyncBatchNorm",
    "apex.contrib.multihead_attn": "torch.nn.MultiheadAttention",
    "apex.contrib.optimizers": "apex_mp.optimizers under torch's fully_shard",
    "apex.contrib.sparsity": "torch.nn.utils.prune",
    "apex.fused_dense": "torch.nn.Linear",
    "apex.mlp": "torch.nn.Sequential of Linear and ReLU",
    "apex.pyprof": "torch.profiler",
    "apex.transformer": "the copy of it in Megatron-LM",
}
_GONE = {
    "torch.eig": "torch.linalg.eig",
}


def modernized(source: Source) -> Iterator[Use]:
    """Yield uses of what `--modernize` supplies."""
    for name, where in source.uses:
        module, _, last = name.rpartition(".")
        if name.startswith("torch._six"):
            yield Use("torch._six", where)
        elif last in _SUPPLIED.get(module, ()) and not _is_there(module, last):
            yield Use(name, where)
    for call in source.calls:
        what = _in_call(call)
        if what is not None:
            yield Use(what, call.where)
    yield from _with_masks(source)
    yield from _of_samplers(source)
    views, unrecorded = _views_of_parameters(source), _without_grad(source)
    for node in source.nodes:
        if isinstance(node, ast.Subscript) and _is_number_of_loss(node):
            yield Use("loss.data[0]", source.where(node))
        if isinstance(node, ast.Call) and _is_of_data(node):
            yield Use(f"x.data.{node.func.attr}()", source.where(node))  # type: ignore[attr-defined]
        changed = _changed_in_place(node)
        is_view = changed is not None and id(node) not in unrecorded and _is_view(changed, views)
        if is_view and isinstance(node, (ast.expr, ast.stmt)):
            yield Use("an in-place change of a view of a parameter", source.where(node))


def _is_there(module: str, name: str) -> bool:
    """Return whether a module still has a name; imports nothing, because that would run code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that numpy is about to drop
        return name not in REPLACED and hasattr(sys.modules.get(module), name)


def _in_call(call: Call) -> str | None:
    """Return what `--modernize` supplies for a call, or None."""
    keywords = {keyword.arg for keyword in call.node.keywords}
    if None in keywords:  # **options
        return None
    count = len(call.node.args)
    for name in call.names:
        if name == "yaml.load" and count < 2 and "Loader" not in keywords:
            return "yaml.load without a Loader"
        if name == "torch.load" and "weights_only" not in keywords:
            return "torch.load of any pickle"
        if name == "torch.full" and count > 1 and "dtype" not in keywords:
            fill = call.node.args[1]
            if isinstance(fill, ast.Constant) and type(fill.value) is int:
                return "torch.full of an int"
        if name == "torch.stft" and "return_complex" not in keywords and count < 10:
            return "torch.stft without return_complex"
        if name == "numpy.fromstring" and "sep" not in keywords and count < 4:
            return "numpy.fromstring of bytes"
        if name == "numpy.array" and _is_false(call.node, "copy"):
            return "numpy.array(copy=False)"
        if name.startswith("torch.optim.lr_scheduler.") and "verbose" in keywords:
            return f"{name.rpartition('.')[2]}(verbose=)"
    function = call.node.func
    if isinstance(function, ast.Attribute) and function.attr in _METHODS:
        return f"{function.attr}()"
    is_next = isinstance(function, ast.Attribute) and function.attr == "next" and not count
    return "iterator.next()" if is_next and "iter" in ast.unparse(function) else None


def _is_false(node: ast.Call, keyword: str) -> bool:
    values = [each.value for each in node.keywords if each.arg == keyword]
    return any(isinstance(value, ast.Constant) and value.value is False for value in values)


def _of_samplers(source: Source) -> Iterator[Use]:
    """Yield the calls of Sampler.__init__ with the data source."""
    for node in source.nodes:
        if not isinstance(node, ast.ClassDef):
            continue
        names = [name for base in node.bases for name in source.full_names(base)]
        if _SAMPLERS.isdisjoint(names):
            continue
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and len(call.args) + len(call.keywords) > 0:
                function = ast.unparse(call.func)
                own = len(call.args) == 1 and function.endswith("Sampler.__init__")
                is_super = function.startswith("super(") and function.endswith(".__init__")
                if is_super or (function.endswith("Sampler.__init__") and not own):
                    yield Use("Sampler.__init__(data_source)", source.where(call))


def _with_masks(source: Source) -> Iterator[Use]:
    """Yield uint8 masks that a file makes, if it uses masks; and `1 - (a == b)`."""
    attributes = [node for node in source.nodes if isinstance(node, ast.Attribute)]
    takes_masks = any(_MASKED.fullmatch(node.attr) for node in attributes)
    for each in attributes if takes_masks else ():
        if each.attr == "byte" or any(name in _BYTES for name in source.full_names(each)):
            yield Use("masks of uint8", source.where(each))
    for node in source.nodes:
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Sub):
            continue
        if isinstance(node.left, ast.Constant) and isinstance(node.right, ast.Compare):
            yield Use("1 - mask", source.where(node))


def _is_number_of_loss(node: ast.Subscript) -> bool:
    of_data = isinstance(node.value, ast.Attribute) and node.value.attr == "data"
    is_first = isinstance(node.slice, ast.Constant) and node.slice.value == 0
    return of_data and is_first and "loss" in ast.unparse(node.value).lower()


def _is_of_data(node: ast.Call) -> bool:
    function = node.func
    is_known = isinstance(function, ast.Attribute) and function.attr in OF_DATA
    return is_known and getattr(function.value, "attr", "") == "data"  # type: ignore[attr-defined]


def _changed_in_place(node: ast.AST) -> ast.expr | None:
    """Return the view that a statement or call changes, if it is one by its form."""
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return target if isinstance(target, ast.Subscript) else None
    function = node.func if isinstance(node, ast.Call) else None
    is_in_place = isinstance(function, ast.Attribute) and re.fullmatch(
        r"[a-z]\w*[a-z\d]_", function.attr
    )
    return function.value if is_in_place else None  # type: ignore[union-attr]


def _without_grad(source: Source) -> set[int]:
    """Return the nodes in blocks of no_grad, by id()."""
    blocks = [node for node in source.nodes if isinstance(node, (ast.With, ast.FunctionDef))]
    heads = [
        [item.context_expr for item in node.items]
        if isinstance(node, ast.With)
        else node.decorator_list
        for node in blocks
    ]
    pairs = zip(blocks, heads, strict=True)
    off = [block for block, head in pairs if any("no_grad" in ast.unparse(each) for each in head)]
    return {id(node) for block in off for node in ast.walk(block)}


def _views_of_parameters(source: Source) -> set[str]:
    """Return the names of views of weights and biases, as in `b = conv.bias.view(3, -1)`."""
    assigned = (node for node in source.nodes if isinstance(node, ast.Assign))
    return {ast.unparse(node.targets[0]) for node in assigned if _is_view(node.value, set())}


def _is_view(node: ast.expr, known: set[str]) -> bool:
    """Return whether an expression is a part of a weight or bias, not of its data."""
    base = node
    while isinstance(base, (ast.Subscript, ast.Call)):
        if isinstance(base, ast.Subscript):
            base = base.value
        elif isinstance(base.func, ast.Attribute) and base.func.attr in _VIEWS:
            base = base.func.value
        else:
            return False
    is_parameter = isinstance(base, ast.Attribute) and base.attr in ("weight", "bias")
    return base is not node and (is_parameter or (isinstance(base, ast.Name) and base.id in known))


def on_gpu(source: Source) -> Iterator[str]:
    """Yield the places where a file asks for a GPU."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asks = node.func.attr == "cuda"
        else:
            value = node.value if isinstance(node, ast.Constant) else None
            asks = isinstance(value, str) and _GPU_WORDS.fullmatch(value) is not None
        if asks and isinstance(node, ast.expr):
            yield source.where(node)
    for name, where in source.uses:
        if name.startswith("torch.nn.SyncBatchNorm"):
            yield f"{where} (torch's SyncBatchNorm)"


def in_16_bits(source: Source) -> Iterator[Use]:
    """Yield the calls that make the weights of a model float16 or bfloat16."""
    for call in source.calls:
        function = call.node.func
        if not isinstance(function, ast.Attribute) or function.attr not in _CASTING:
            continue
        given = [*call.node.args, *(keyword.value for keyword in call.node.keywords)]
        dtypes = {ast.unparse(each).removeprefix("torch.").strip("'") for each in given}
        casts = function.attr in _CASTS and not given
        casts = casts or (function.attr == "to" and bool(dtypes & _16_BITS))
        if casts and _MODEL.search(ast.unparse(function.value)):
            yield Use(f"weights in 16 bits by {function.attr}()", call.where)
        elif function.attr == "from_pretrained" and dtypes & _16_BITS:
            yield Use("weights in 16 bits by from_pretrained()", call.where)


def scaled(source: Source) -> Iterator[Use]:
    """Yield the uses of torch's GradScaler."""
    for name, where in source.uses:
        if name.startswith("torch.") and name.endswith(".GradScaler"):
            what = "torch's GradScaler, which stops: Attempting to unscale FP16 gradients"
            yield Use(what, where)


def unsupported(source: Source) -> Iterator[tuple[str, Use]]:
    """Yield what will not work: its name, empty if it has none, and a remedy."""
    for name, where in source.uses:
        sentence = _absence(name) if is_of_apex(name) else None
        if name in _GONE:
            sentence = f"{name} was removed; use {_GONE[name]}"
        if sentence is not None:
            yield name, Use(sentence, where)
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and _is_legacy_function(node, source):
            sentence = (
                f"{node.name}: torch wants forward and backward of an autograd Function as static "
                "methods that take ctx"
            )
            yield "", Use(sentence, source.where(node))


def _absence(name: str) -> str | None:
    """Return the remedy for a name of apex that apex_mp lacks."""
    for module, each in places_of(name):
        instead = MISSING.get(module, {}).get(each)
        return None if instead is None else f"{module}.{each} is not in apex_mp; {instead}"
    if name.removesuffix(".*") in MODULES:
        return None
    for module, instead in _ELSEWHERE.items():
        if f"{name}.".startswith(f"{module}."):
            return f"{name} is not in apex_mp; use {instead}"
    parent, _, last = name.rpartition(".")
    if parent in MODULES and last.startswith("__"):
        return None
    return f"{name} is not in apex_mp"


def _is_legacy_function(node: ast.ClassDef, source: Source) -> bool:
    names = [name for base in node.bases for name in source.full_names(base)]
    if not {"torch.autograd.Function", "torch.autograd.function.Function"} & {*names}:
        return False
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    return any(each.name == "forward" and not each.decorator_list for each in methods)
