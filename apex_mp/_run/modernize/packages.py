"""Names that other packages have dropped, added when a script imports the package."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from apex_mp._run.modernize.notes import note
from apex_mp._run.replacements import Replacements

_IMAGE = {"ANTIALIAS": "LANCZOS", "LINEAR": "BILINEAR", "CUBIC": "BICUBIC"}
_MODELS = (
    *("alexnet", "densenet", "googlenet", "inception"),
    *("mobilenet", "resnet", "squeezenet", "vgg"),
)
# By module, the names that are supplied.
NAMES: dict[str, tuple[str, ...]] = {
    **{f"torchvision.models.{name}": ("model_urls",) for name in _MODELS},
    "PIL": ("PILLOW_VERSION",),
    "PIL.Image": (*_IMAGE,),
    "matplotlib.cm": ("get_cmap",),
    "transformers": ("AdamW",),
    "transformers.optimization": ("AdamW",),
}


def supply(replacements: Replacements) -> None:
    """Change the packages when they are imported, or now if they are imported already."""
    finder = _Finder({name: functools.partial(change, replacements) for name, change in CHANGED})
    for name, change in CHANGED:
        if name in sys.modules:
            change(replacements, sys.modules[name])
    sys.meta_path.insert(0, finder)
    replacements.at_undo(lambda: sys.meta_path.remove(finder))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that Python finds, and changes some of them after they have run.

    Args:
        changes: By name of the module, the function to call with it.
    """

    def __init__(self, changes: dict[str, Callable[[ModuleType], None]]) -> None:
        self._changes = changes

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        change = self._changes.get(fullname)
        spec = PathFinder.find_spec(fullname, path) if change is not None else None
        if change is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(sys.modules[fullname])  # transformers puts another in its place.

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _change_yaml(replacements: Replacements, yaml: ModuleType) -> None:
    original = yaml.load

    @functools.wraps(original)
    def load(stream: Any, Loader: Any = None) -> Any:  # noqa: N803
        if Loader is None:
            note("yaml.load without a Loader", "is yaml.full_load")
            Loader = yaml.FullLoader  # noqa: N806
        return original(stream, Loader)

    replacements.set(yaml, "load", load)


def _change_pillow(replacements: Replacements, pillow: ModuleType) -> None:
    if not hasattr(pillow, "PILLOW_VERSION") and hasattr(pillow, "__version__"):
        replacements.set(pillow, "PILLOW_VERSION", pillow.__version__)


def _change_draw(replacements: Replacements, draw: ModuleType) -> None:
    for old, new in (("textsize", "textbbox"), ("multiline_textsize", "multiline_textbbox")):
        if not hasattr(draw.ImageDraw, old):
            replacements.set(draw.ImageDraw, old, _size_by_box(old, new, ((0, 0),)))


def _change_font(replacements: Replacements, font: ModuleType) -> None:
    for kind in (font.ImageFont, font.FreeTypeFont, font.TransposedFont):
        if not hasattr(kind, "getsize"):
            replacements.set(kind, "getsize", _size_by_box("getsize", "getbbox", ()))


def _size_by_box(old: str, new: str, first: tuple[Any, ...]) -> Callable[..., tuple[int, int]]:
    def size(self: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
        note(f"{old} of PIL", f"is the size of {new}")
        left, _, right, bottom = getattr(self, new)(*first, *args, **kwargs)
        return right - left, bottom  # From the anchor, as it was.

    return size


def _change_canvas(replacements: Replacements, backend: ModuleType) -> None:
    canvas = backend.FigureCanvasAgg
    if hasattr(canvas, "tostring_rgb"):
        return

    def tostring_rgb(self: Any) -> bytes:
        note("FigureCanvasAgg.tostring_rgb", "is buffer_rgba without its last channel")
        pixels = memoryview(self.buffer_rgba()).tobytes()
        return b"".join(pixels[place : place + 3] for place in range(0, len(pixels), 4))

    replacements.set(canvas, "tostring_rgb", tostring_rgb)


def _change_colors(replacements: Replacements, cm: ModuleType) -> None:
    if hasattr(cm, "get_cmap"):
        return

    def get_cmap(name: Any = None, lut: int | None = None) -> Any:
        note("matplotlib.cm.get_cmap", "is matplotlib.pyplot.get_cmap")
        return importlib.import_module("matplotlib.pyplot").get_cmap(name, lut)

    replacements.set(cm, "get_cmap", get_cmap)


def _change_tokenizers(replacements: Replacements, base: ModuleType) -> None:
    kind = base.PreTrainedTokenizerBase
    for name in ("encode_plus", "batch_encode_plus"):
        if not hasattr(kind, name):
            replacements.set(kind, name, _encoding(name))
    if not hasattr(kind, "max_len"):
        replacements.set(kind, "max_len", property(lambda self: self.model_max_length))


def _encoding(name: str) -> Callable[..., Any]:
    def encode(
        self: Any,
        *texts: Any,
        pad_to_max_length: bool = False,
        return_token_type_ids: bool = True,
        **kwargs: Any,
    ) -> Any:
        note(f"{name} of a tokenizer", "is a call of it")
        if pad_to_max_length:
            kwargs["padding"] = "max_length"
        if kwargs.get("max_length") is not None:
            kwargs.setdefault("truncation", True)
        return self(*texts, return_token_type_ids=return_token_type_ids, **kwargs)

    return encode


def _change_image(replacements: Replacements, image: ModuleType) -> None:
    for old, new in _IMAGE.items():
        if not hasattr(image, old):
            replacements.set(image, old, getattr(image, new))


def _change_models(replacements: Replacements, module: ModuleType) -> None:
    if hasattr(module, "model_urls"):
        return
    urls = {}
    for name, weights in vars(module).items():
        first = getattr(weights, "IMAGENET1K_V1", None)
        if name.endswith("_Weights") and first is not None:
            urls[name.removesuffix("_Weights").lower()] = first.url
    if "inception_v3" in urls:
        urls["inception_v3_google"] = urls["inception_v3"]
    replacements.set(module, "model_urls", urls)


def _change_transformers(replacements: Replacements, transformers: ModuleType) -> None:
    if hasattr(transformers, "AdamW"):
        return
    from apex_mp.optimizers import FusedAdam

    class AdamW(FusedAdam):
        """The optimizer that transformers had until version 5."""

        def __init__(
            self,
            params: Any,
            lr: float = 1e-3,
            betas: tuple[float, float] = (0.9, 0.999),
            eps: float = 1e-6,
            weight_decay: float = 0.0,
            correct_bias: bool = True,
            no_deprecation_warning: bool = False,
        ) -> None:
            note("transformers.AdamW", "is apex_mp.optimizers.FusedAdam")
            options = {"eps": eps, "weight_decay": weight_decay, "bias_correction": correct_bias}
            super().__init__(params, lr, betas=betas, **options)  # type: ignore[arg-type]

    replacements.set(transformers, "AdamW", AdamW)


CHANGED: tuple[tuple[str, Callable[[Replacements, ModuleType], None]], ...] = (
    *((f"torchvision.models.{name}", _change_models) for name in _MODELS),
    ("yaml", _change_yaml),
    ("PIL", _change_pillow),
    ("PIL.ImageDraw", _change_draw),
    ("PIL.ImageFont", _change_font),
    ("matplotlib.backends.backend_agg", _change_canvas),
    ("matplotlib.cm", _change_colors),
    ("transformers.tokenization_utils_base", _change_tokenizers),
    ("PIL.Image", _change_image),
    ("transformers", _change_transformers),
    ("transformers.optimization", _change_transformers),
)
