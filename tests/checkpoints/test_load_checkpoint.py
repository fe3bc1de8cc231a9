"""load_checkpoint: old files load with the scalers that they hold, hostile ones run nothing."""

from __future__ import annotations

import io
import os
import pickle
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fp16_cases import FACES, parameter, pull
from pickle_cases import (
    CONTAINERS,
    as_old_file,
    built,
    by_global,
    by_instance,
    by_stack_global,
    save_object,
)

import apex_mp
from apex_mp import amp, fp16_utils, loss_scale
from apex_mp.fp16_utils import DynamicLossScaler, LossScaler
from apex_mp.optimizers import FusedAdam
from apex_mp.scale.amp_scaler import LossScaler as AmpLossScaler

pytestmark = pytest.mark.cpu_only


OLD = "apex.fp16_utils.loss_scaler"
formats = pytest.mark.parametrize("new", [True, False], ids=["zip", "old"])
containers = pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS.keys())

DYNAMIC = {
    "cur_scale": 2.0**20,
    "cur_iter": 70,
    "last_overflow_iter": 60,
    "scale_factor": 2.0,
    "scale_window": 1000,
}
OF_AMP_2018 = {
    "_loss_scale": 2.0**15,
    "_max_loss_scale": 2.0**24,
    "_scale_seq_len": 2000,
    "_unskipped": 17,
    "_overflow_buf": torch.zeros(4, dtype=torch.uint8),
}
OF_AMP_2019 = {
    **OF_AMP_2018,
    "dynamic": True,
    "_min_loss_scale": 4.0,
    "_has_overflow": False,
}


@formats
@pytest.mark.parametrize("package", ["apex", "apex_mp"])
def test_the_scalers_of_fp16_utils_arrive_as_ours(package: str, new: bool, tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    options = {"_use_new_zipfile_serialization": new}
    name = OLD.replace("apex", package)
    save_object(path, f"{name}.DynamicLossScaler", DYNAMIC, **options)
    loaded = apex_mp.load_checkpoint(path)
    assert type(loaded["scaler"]) is DynamicLossScaler
    assert DYNAMIC.items() <= vars(loaded["scaler"]).items()
    assert loaded["tensor"].tolist() == [0.0, 1.0, 2.0]
    loaded["scaler"].update_scale(True)
    assert loaded["scaler"].loss_scale == 2.0**19
    save_object(path, f"{name}.LossScaler", {"cur_scale": 128.0}, **options)
    scaler = apex_mp.load_checkpoint(str(path))["scaler"]
    assert type(scaler) is LossScaler
    assert scaler.loss_scale == 128.0


@formats
def test_the_scalers_of_amp_arrive_as_ours(new: bool, tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    for attributes in (OF_AMP_2018, OF_AMP_2019):
        save_object(
            path, "apex.amp.scaler.LossScaler", attributes, _use_new_zipfile_serialization=new
        )
        scaler = apex_mp.load_checkpoint(path)["scaler"]
        assert type(scaler) is AmpLossScaler
        assert (scaler.loss_scale(), scaler._unskipped, scaler.dynamic) == (2.0**15, 17, True)
        assert (scaler.value.growth_interval, scaler.value.max_scale) == (2000, 2.0**24)
    assert scaler.value.min_scale == 4.0
    save_object(
        path, "apex.amp.scaler.LossScaler", {**OF_AMP_2019, "dynamic": False, "_loss_scale": 64.0}
    )
    scaler = apex_mp.load_checkpoint(path)["scaler"]
    assert (scaler.loss_scale(), scaler.dynamic) == (64.0, False)


@formats
@pytest.mark.parametrize("face", FACES.values(), ids=FACES.keys())
@pytest.mark.parametrize(
    ("name", "attributes", "scale", "window"),
    [
        (f"{OLD}.DynamicLossScaler", DYNAMIC, 2.0**20, 1000),
        ("apex.amp.scaler.LossScaler", OF_AMP_2019, 2.0**15, 2000),
    ],
    ids=["fp16_utils", "amp"],
)
def test_a_run_of_2019_goes_on_from_its_file(
    name: str, attributes: Any, scale: float, window: int, face: Any, new: bool, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.pt"
    weight = parameter([1.0, 2.0])
    saver = fp16_utils.FP16_Optimizer(torch.optim.Adam([weight]), 2.0, verbose=False)
    saver.backward(pull((weight, [0.5, 1.0])))
    saver.step()
    save_object(path, name, attributes, _use_new_zipfile_serialization=new)
    state = {**saver.state_dict(), "loss_scaler": apex_mp.load_checkpoint(path)["scaler"]}
    state["dynamic_loss_scale"] = True
    del state["cur_iter"]
    again = parameter([0.0, 0.0])
    optimizer = face(torch.optim.Adam([again]), verbose=False)
    optimizer.load_state_dict(state)
    assert torch.equal(again, weight)
    assert (optimizer.loss_scale, optimizer.scale_window) == (scale, window)
    again.grad = None
    optimizer.backward(pull((again, [2.0**-9, 2.0**-10])))
    optimizer.step()
    assert not optimizer.overflow
    assert not torch.equal(again, weight)


def plain_states() -> dict[str, Any]:
    """Every state_dict that the package writes."""
    handle = amp.init(device_type="cpu")
    weight = torch.nn.Parameter(torch.ones(2))
    half = parameter([1.0, 2.0])
    states = {
        "handle": handle.state_dict(),
        "amp scaler": AmpLossScaler().state_dict(),
        "static scaler": LossScaler(2.0).state_dict(),
        "dynamic scaler": DynamicLossScaler().state_dict(),
        "loss_scale": loss_scale.to_dict(loss_scale.AMP_PRESET),
    }
    for name, face in FACES.items():
        for dynamic in (True, False):
            optimizer = face(FusedAdam([parameter([1.0])]), 2.0, dynamic, verbose=False)
            optimizer.backward(pull((optimizer.all_fp16_params[0], 1.0)))
            optimizer.step()
            states[f"{name} {dynamic}"] = optimizer.state_dict()
    fused = FusedAdam([half], master_weights=True)
    half.grad = torch.ones_like(half)
    fused.step()
    states["FusedAdam"] = fused.state_dict()
    states["OptimWrapper"] = handle.wrap_optimizer(FusedAdam([weight]), 2).state_dict()
    handle._deactivate()
    model = torch.nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    states |= {"amp": amp.state_dict(), "O2": model.state_dict(), "SGD": optimizer.state_dict()}
    for wrap in (fp16_utils.network_to_half, fp16_utils.FP16Model):
        states[wrap.__name__] = wrap(torch.nn.Linear(2, 2)).state_dict()
    return states


@formats
@pytest.mark.usefixtures("amp_off")
def test_every_state_dict_of_ours_loads_with_weights_only(new: bool, tmp_path: Path) -> None:
    for name, state in plain_states().items():
        torch.save(state, tmp_path / name, _use_new_zipfile_serialization=new)
        loaded = torch.load(tmp_path / name, weights_only=True)
        assert str(loaded) == str(state), name
        assert str(apex_mp.load_checkpoint(tmp_path / name)) == str(state), name


# Files that ask for something else.

RAN = "APEX_MP_TEST_RAN"
HOSTILE: dict[str, tuple[bytes, str]] = {
    "os.system": (by_global("os", "system", f"touch {RAN}"), "asks for os.system;"),
    "posix.system": (by_global("posix", "system", f"touch {RAN}"), "asks for posix.system;"),
    "builtins.eval": (
        by_global("builtins", "eval", f"__import__('os').mkdir({RAN!r})"),
        "asks for builtins.eval;",
    ),
    "eval of Python 2": (
        by_global("__builtin__", "eval", f"__import__('os').mkdir({RAN!r})"),
        "asks for __builtin__.eval;",
    ),
    "an attribute path": (
        by_global("torch", "os.system", f"touch {RAN}"),
        "asks for torch.os.system;",
    ),
    "a module path": (by_global("torch.os", "system", f"touch {RAN}"), "asks for torch.os.system;"),
    "getattr": (by_global("builtins", "getattr", "x", "y"), "asks for builtins.getattr;"),
    "STACK_GLOBAL": (by_stack_global("os", "system", f"touch {RAN}"), "asks for os.system;"),
    "INST": (by_instance("os", "system", f"touch {RAN}"), "asks for os.system;"),
    "another class of apex": (
        by_global("apex.fp16_utils.fp16_optimizer", "FP16_Optimizer"),
        "asks for apex.fp16_utils.fp16_optimizer.FP16_Optimizer;",
    ),
    "a path through a scaler": (
        by_global(OLD, "LossScaler.__init__.__globals__"),
        f"asks for {OLD}.LossScaler.__init__.__globals__;",
    ),
    "a scaler that is called": (
        by_global(OLD, "LossScaler"),
        f"asks for a call of {OLD}.LossScaler",
    ),
    "a scaler that is called with arguments": (
        by_global(OLD, "DynamicLossScaler", "x" * 99, [1]),
        f"asks for a {OLD}.DynamicLossScaler with arguments, ('xxx",
    ),
    "a scaler made with arguments": (
        built(f"{OLD}.LossScaler", {"cur_scale": 1.0}, 3),
        f"asks for a {OLD}.LossScaler with arguments, (3,)",
    ),
    "attributes that are a list": (
        built(f"{OLD}.LossScaler", [1]),
        f"asks for a {OLD}.LossScaler whose attributes are a list",
    ),
    "attributes in slots": (
        built(f"{OLD}.LossScaler", ({}, {"cur_scale": 1.0})),
        "whose attributes are a tuple",
    ),
    "attributes that are None": (built(f"{OLD}.LossScaler", None), "whose attributes are a None"),
    "a method among the attributes": (
        built(f"{OLD}.LossScaler", {"cur_scale": 1.0, "backward": print.__name__}),
        "['backward'] unknown",
    ),
    "an attribute missing": (
        built(f"{OLD}.DynamicLossScaler", {"cur_scale": 1.0}),
        "['cur_iter', 'last_overflow_iter'] are missing",
    ),
    "a scale that is a word": (
        built(f"{OLD}.LossScaler", {"cur_scale": "1"}),
        "scale is '1'; it must be a number",
    ),
    "a scale that is a tensor of 2018's list": (
        built(f"{OLD}.DynamicLossScaler", {**DYNAMIC, "scale_window": [3]}),
        "a apex.fp16_utils.loss_scaler.DynamicLossScaler that makes no sense",
    ),
    "an attribute of amp's that it never had": (
        built("apex.amp.scaler.LossScaler", {**OF_AMP_2019, "_overflow_buf": 0, "_value": 3}),
        "'_value'",
    ),
    "a window of amp's that is a word": (
        built("apex.amp.scaler.LossScaler", {"_loss_scale": 2.0, "_scale_seq_len": "long"}),
        "growth_interval is 'long'; it must be an int",
    ),
}


@containers
@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_that_asks_for_something_else_is_refused_by_name(
    case: str, container: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pickled, words = HOSTILE[case]
    container(pickled, tmp_path / "hostile.pt")
    with pytest.raises(pickle.UnpicklingError) as raised:
        apex_mp.load_checkpoint("hostile.pt")
    assert words in str(raised.value)
    assert str(raised.value).startswith("load_checkpoint: hostile.pt asks for ")
    assert "weights_only=False" not in str(raised.value)
    with (tmp_path / "hostile.pt").open("rb") as file:
        file.seek(0)
        with pytest.raises(pickle.UnpicklingError) as again:
            apex_mp.load_checkpoint(file)
    assert words in str(again.value)
    assert os.listdir(tmp_path) == ["hostile.pt"]


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "STACK_GLOBAL"])
def test_the_hostile_files_do_run_when_pickle_reads_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(HOSTILE[name][0])  # Otherwise the test above would prove nothing.
    assert os.listdir(tmp_path) == [RAN]


def test_the_names_of_2019_are_forgotten_after_a_load(tmp_path: Path) -> None:
    before = {*torch.serialization.get_safe_globals()}
    save_object(tmp_path / "old.pt", f"{OLD}.LossScaler", {"cur_scale": 2.0})
    apex_mp.load_checkpoint(tmp_path / "old.pt")
    as_old_file(HOSTILE["os.system"][0], tmp_path / "hostile.pt")
    with pytest.raises(pickle.UnpicklingError):
        apex_mp.load_checkpoint(tmp_path / "hostile.pt")
    assert {*torch.serialization.get_safe_globals()} == before
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "old.pt", weights_only=True)


def saved(value: Any, *, new: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=new)
    return file.getvalue()


def archive_of(name: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, "text")
    return file.getvalue()


OF_NEW, OF_OLD = saved({"a": torch.ones(1000)}), saved({"a": torch.ones(1000)}, new=False)
NOTHING = "is no checkpoint: it holds nothing that torch.save has written"
ARCHIVE = "is no checkpoint: it is an archive, but not of torch.save"
DAMAGED = "is cut short, or damaged; copy or save it again"
NO_CHECKPOINTS = {
    "nothing": (b"", "is no checkpoint: it is empty"),
    "text": (b"hello world, this is text", NOTHING),
    "json": (b'{"a": 1}', NOTHING),
    "all bytes": (bytes(range(256)), NOTHING),
    "zeros": (bytes(1000), NOTHING),
    "a plain pickle": (pickle.dumps([1, 2], 2), NOTHING),
    "a later pickle": (pickle.dumps([1, 2], 4), NOTHING),
    "an archive": (archive_of("a.txt"), ARCHIVE),
    "an archive in a folder": (archive_of("folder/a.txt"), ARCHIVE),
    "TorchScript": (archive_of("net/constants.pkl"), "it is for torch.jit.load, if you trust it"),
    "half of an archive": (OF_NEW[: len(OF_NEW) // 2], DAMAGED),
    "the beginning of an archive": (OF_NEW[:10], DAMAGED),
    "the beginning of an old file": (OF_OLD[:20], DAMAGED),
    "the pickle of an old file": (OF_OLD[:150], DAMAGED),
    "all but the end of an old file": (OF_OLD[:-10], DAMAGED),
}


@pytest.mark.parametrize("case", NO_CHECKPOINTS)
def test_what_is_no_checkpoint_is_refused_in_a_sentence(case: str, tmp_path: Path) -> None:
    content, words = NO_CHECKPOINTS[case]
    path = tmp_path / "some.pt"
    path.write_bytes(content)
    for given, name in ((path, str(path)), (io.BytesIO(content), "the file")):
        with pytest.raises(pickle.UnpicklingError) as raised:
            apex_mp.load_checkpoint(given)
        assert str(raised.value).startswith(f"load_checkpoint: {name} is ")
        assert str(raised.value).endswith(words)


def damaged_copies(content: bytes) -> Iterator[bytes]:
    """Copies that are cut short, and copies in which a few bytes are others."""
    yield from (content[:length] for length in range(0, len(content), 29))
    draw = random.Random(0)
    for _ in range(400):
        copy = bytearray(content)
        for _ in range(draw.choice([1, 2, 5])):
            place = draw.randrange(len(copy))
            copy[place] = draw.choice([0, 255, copy[place] ^ 1 << draw.randrange(8)])
        yield bytes(copy)


@formats
def test_a_damaged_file_loads_or_is_an_unpickling_error(new: bool) -> None:
    weight = parameter([1.0, 2.0])
    optimizer = fp16_utils.FP16_Optimizer(FusedAdam([weight]), dynamic_loss_scale=True)
    optimizer.backward(pull((weight, 1.0)))
    optimizer.step()
    content = saved({"optimizer": optimizer.state_dict(), "at": "Zürich"}, new=new)
    refused = 0
    for damaged in damaged_copies(content):
        try:
            apex_mp.load_checkpoint(io.BytesIO(damaged))
        except pickle.UnpicklingError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("new", [True, False])
def test_an_error_of_map_location_is_left_as_it_is(new: bool) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError("as planned")

    for place, kind in ((fail, KeyError), ("nowhere", RuntimeError)):
        with pytest.raises(kind, match=r"as planned|nowhere"):
            apex_mp.load_checkpoint(io.BytesIO(saved(torch.ones(1), new=new)), map_location=place)


def test_a_process_killed_while_it_writes_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint.pt"
    apex_mp.save_checkpoint({"step": 1}, path)

    def killed(state: object, target: Path) -> None:
        Path(target).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        apex_mp.save_checkpoint({"step": 2}, path)
    assert apex_mp.load_checkpoint(path) == {"step": 1}
    assert [*tmp_path.iterdir()] == [path]


@containers
def test_a_scaler_that_never_gets_its_attributes_is_refused(container: Any, tmp_path: Path) -> None:
    container(b"\x80\x02" + f"c{OLD}\nLossScaler\n".encode() + b")\x81.", tmp_path / "x.pt")
    with pytest.raises(pickle.UnpicklingError, match=r"LossScaler without its attributes"):
        apex_mp.load_checkpoint(tmp_path / "x.pt")
