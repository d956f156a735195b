"""`plan`: the memory that loading takes, prices by hand-made figures, and the command."""

import json
import re
from dataclasses import replace

import pytest
import torch

from spmoe_lite import cli, cputime
from spmoe_lite import forecast as forecasts
from spmoe_lite.converters import convert
from spmoe_lite.cutoff import Profile, expected_copies, save_profile
from spmoe_lite.engine import Engine
from spmoe_lite.errors import CapacityError, UnsupportedError, UsageError
from spmoe_lite.forecast import forecast
from spmoe_lite.loading import Loader, profile_path
from spmoe_lite.pack import Pack
from spmoe_lite.plan import ModelSize
from spmoe_lite.progress import digits
from spmoe_lite.speed import Costs, acceptance, mean_accepted, predict
from tests import tiny

HERE = torch.device("cpu")
MEASURED = Profile(
    expert_copy_ms=2.0,
    draft_token_ms=1.0,
    target_layer_ms=0.5,
    plain_layer_ms=0.25,
    verify_rows=5,
    copy_gbps=9.0,
    acceptance=0.75,
    miss_ratio=0.5,
)


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs")
    hf = tiny.tiny_mixtral(folder / "t", layers=3, experts=8, scale_head=4.0)
    target = convert(hf, out=folder / "target.spmoe").path
    return target, tiny.tiny_pack(folder / "d", kind="mistral", layers=3)


@pytest.fixture(autouse=True)
def no_card_and_no_profile(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path / "home"))


def spmoe(*args):
    with pytest.raises(SystemExit) as stop:
        cli.main([str(arg) for arg in args])
    return stop.value.code


# --- memory


@pytest.mark.parametrize("with_draft", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"vram": "6MB"},
        {"vram": "6MB", "kv_type": "int8", "ctx_size": 100},
        {"vram": "20MB", "slots": 7},
        {"vram": "8MB", "draft_tokens": 9},
    ],
)
def test_it_is_the_plan_that_loading_makes(packs, with_draft, options):
    pair = packs if with_draft else packs[:1]
    with Engine.load(*pair, device="cpu", **options) as engine:
        loaded = engine.plan
    assert loaded.token_seconds is None  # nothing is timed before an answer may begin
    planned = forecast(*pair, device="cpu", **options).plan
    for moment in ("read_rate", "token_seconds", *([] if "vram" in options else ["budget"])):
        planned = replace(planned, **{moment: getattr(loaded, moment)})
    assert planned == loaded
    assert planned.total_bytes <= planned.budget


def test_no_weight_is_read(packs, monkeypatch):
    def fail(*args, **given):
        raise AssertionError("weights")

    for name in ("_read", "_map", "load_dense"):
        monkeypatch.setattr(Pack, name, fail)
    assert forecast(*packs, device="cpu").plan.slots == 24
    assert forecast(*packs, vram="24GB").plan.slots == 24


def test_without_a_gpu_a_size_means_a_card_and_cpu_this_machine(packs):
    card = forecast(*packs, vram="450MB")
    assert card.plan.device == "cuda" and card.plan.reserve_bytes > 0
    assert card.plan == forecast(*packs, vram="450MB", device="cuda").plan
    assert forecast(*packs, vram="450MB", device="cpu").plan.device == "cpu"
    assert forecast(*packs, vram=0.9).plan.device == "cpu"  # of what is free: here
    assert forecast(*packs).plan.device == "cpu"
    for vram in ("auto", "0.5"):
        with pytest.raises(UsageError, match="--vram 24GB"):
            forecast(*packs, device="cuda", vram=vram)


def test_a_refusal_is_that_of_loading_and_its_advice_works(packs):
    options = {"vram": "4MB", "slots": 12}
    with pytest.raises(CapacityError) as refused:
        forecast(*packs, device="cpu", **options)
    with pytest.raises(CapacityError) as not_loaded:
        Engine.load(*packs, device="cpu", **options)
    assert str(refused.value) == str(not_loaded.value)
    (vram,) = re.findall(r"raise --vram to (\S+)", str(refused.value))
    assert forecast(*packs, device="cpu", vram=vram, slots=12).plan.slots == 12


def test_what_cannot_fit_is_refused_before_anything_is_timed(packs, monkeypatch):
    def fail(*args, **given):
        raise AssertionError("timed")

    monkeypatch.setattr(cputime, "pass_ms", fail)
    with pytest.raises(AssertionError, match="timed"):
        forecast(*packs, device="cpu", vram="20MB")
    for pair in (packs, packs[:1]):
        with pytest.raises(CapacityError, match="may be used"):
            forecast(*pair, device="cpu", vram="1MB")


def test_a_pair_that_cannot_be_loaded_is_refused(packs, tmp_path):
    other = tiny.tiny_pack(tmp_path, kind="mistral", tokenizer="byte-fallback")
    with pytest.raises(UnsupportedError):
        Engine.load(packs[0], other, device="cpu")
    with pytest.raises(UnsupportedError):
        forecast(packs[0], other, device="cpu")


@pytest.mark.parametrize(
    "options",
    [
        {"link": 0},
        {"link": float("nan")},
        {"link": 1e-320},
        {"memory": 1e-320},
        {"memory": -1.0},
        {"disk": 0},
        {"memory": float("inf")},
        {"acceptance": 1.5},
        {"acceptance": float("nan")},
        {"draft_tokens": 99},
        {"vram": "20"},
        {"vram": "plenty"},
        {"ctx_size": 10**9},
        {"device": "tpu"},
        {"device": "cuda:x", "vram": "24GB"},
    ],
)
def test_what_is_no_figure_is_refused_in_a_line(packs, options):
    with pytest.raises(UsageError) as refused:
        forecast(*packs, **options)
    flag = "--" + next(iter(options)).replace("_", "-")
    assert str(refused.value).startswith(flag) and "\n" not in str(refused.value)


# --- price


def size_of(pack):
    with Pack.open(pack) as opened:
        return ModelSize.of(opened)


def test_a_step_is_what_its_parts_take(packs):
    target, draft = map(size_of, packs)
    rates = dict.fromkeys((*target.dense, "fp32", "bf16"), 1e9)
    costs = Costs(target.stride / 2e-3, rates, MEASURED, acceptance=0.5)
    step = predict(target, draft, 12, 4, costs)
    copies = 3 * expected_copies(8, 2, 5, 0.5) * 0.5  # the miss ratio
    assert step.copies == pytest.approx(copies) and step.copy_ms == pytest.approx(2 * copies)
    assert (step.drafting_ms, step.pass_ms, step.hidden_ms) == (4.0, 1.5, 0.0)
    assert step.tokens == pytest.approx(1 + 0.5 + 0.25 + 0.125 + 0.0625)
    assert step.token_ms == pytest.approx((4 + 1.5 + 2 * copies) / step.tokens)
    assert predict(target, draft, 12, 2, costs).pass_ms == pytest.approx(3 * (0.25 + 0.25 / 2))
    plain = predict(target, None, 12, 4, costs)
    assert (plain.tokens, plain.drafting_ms, plain.pass_ms) == (1, 0, 0.75)
    assert plain.copies == pytest.approx(3 * 2 * 0.5 * 0.5)
    uniform = replace(costs, profile=replace(MEASURED, miss_ratio=None))
    assert predict(target, None, 12, 0, uniform).copies == pytest.approx(3 * 2 * 0.5)
    assert predict(target, draft, 24, 4, costs).copies == 0
    ahead = predict(target, draft, 12, 4, replace(costs, layers_ahead=3, read_rate=1e12))
    assert 0 < ahead.hidden_ms < ahead.copy_ms


def test_without_a_profile_a_pass_takes_its_bytes(packs):
    target, draft = map(size_of, packs)
    rates = dict.fromkeys((*target.dense, *draft.dense, target.dtypes.experts), 1e9)
    costs = Costs(1e9, rates, acceptance=1.0)
    plain = predict(target, None, 24, 0, costs)
    assert plain.pass_ms == pytest.approx((target.dense_bytes + 3 * 2 * target.stride) / 1e6)
    step = predict(target, draft, 24, 1, costs)
    assert step.drafting_ms == pytest.approx(draft.dense_bytes / 1e6) and step.tokens == 2


@pytest.mark.parametrize("rows", [None, 0, 1])
def test_a_profile_without_drafts_does_not_price_checking_them_as_one_row(
    packs, tmp_path, rows, monkeypatch
):
    monkeypatch.setattr(cputime, "pass_ms", lambda model, rows: 2.0 + rows)  # 7 / 3
    alone = replace(MEASURED, verify_rows=rows, target_layer_ms=0.25, draft_token_ms=0.0)
    save_profile(profile_path(["target"], HERE, tmp_path), alone)
    found = forecast(*packs, device="cpu", home=tmp_path)
    assert found.plain_speed.pass_ms == pytest.approx(3 * 0.25)
    assert found.speed.pass_ms == pytest.approx(3 * 0.25 * 7 / 3)
    assert found.speed.drafting_ms == pytest.approx(4 * 3)
    (layer,) = [figure for figure in found.figures if figure.name == "a target layer"]
    assert layer.source.startswith("by profile without drafts")
    (token,) = [figure for figure in found.figures if figure.name == "a draft token"]
    assert token.source.startswith("measured just now")


def test_on_the_cpu_passes_are_timed_on_stand_ins(packs, monkeypatch, tmp_path):
    times = {(True, 1): 6.0, (True, 4): 15.0, (False, 1): 4.0}
    monkeypatch.setattr(cputime, "pass_ms", lambda model, rows: times[model.config.is_moe, rows])
    found = forecast(*packs, device="cpu", home=tmp_path, draft_tokens=3)
    assert found.plain_speed.pass_ms == pytest.approx(6)
    assert found.speed.pass_ms == pytest.approx(15) and found.speed.drafting_ms == pytest.approx(12)
    sources = {figure.name: figure.source for figure in found.figures}
    assert sources["a target layer"] == sources["a draft token"]
    assert sources["a draft token"].startswith("measured just now")
    assert found.plain_plan.token_seconds == pytest.approx(0.006)
    assert forecast(packs[1], device="cpu").speed is None  # dense: nothing to time
    given = forecast(*packs, device="cpu", memory=1.0)
    assert "a target layer" not in {figure.name for figure in given.figures}


# --- RAM that does not hold all experts


def test_what_has_neither_slot_nor_place_comes_from_disk(packs):
    target, draft = map(size_of, packs)
    rates = dict.fromkeys((*target.dense, "fp32", "bf16"), 1e9)
    costs = Costs(target.stride / 2e-3, rates, MEASURED, disk_rate=target.stride / 5e-3)
    step = predict(target, draft, 12, 4, costs, 18)
    assert step.copies == predict(target, draft, 12, 4, costs).copies
    assert step.disk_copies == pytest.approx(3 * expected_copies(8, 2, 5, 18 / 24) * 0.5)
    assert step.disk_share == pytest.approx(0.5)
    assert step.copy_ms == pytest.approx(3.5 * step.copies)  # half of them 2 ms, half 5
    assert step.to_dict()["disk_share"] == step.disk_share
    fast = replace(costs, disk_rate=1e15)  # the bus is what is slow then
    assert predict(target, draft, 12, 4, fast, 18).copy_ms == pytest.approx(2 * step.copies)
    for held in (None, 24):
        assert predict(target, draft, 12, 4, costs, held).disk_copies == 0


@pytest.mark.parametrize("drafts", [0, 4])
def test_no_profile_makes_less_missing_than_one_token_needs(packs, drafts):
    target, draft = map(size_of, packs)
    rates = dict.fromkeys((*target.dense, "fp32", "bf16"), 1e9)
    costs = Costs(target.stride / 2e-3, rates, replace(MEASURED, miss_ratio=0.0))
    step = predict(target, draft, 2, drafts, costs, 3)
    assert (step.copies, step.disk_copies) == (3 * 2 - 2, 3 * 2 - 3)
    assert predict(target, draft, 6, drafts, costs, 7).copies == 0


def test_a_card_that_is_not_here_beside_little_ram(packs, capsys, tmp_path):
    target, draft = packs
    stride = size_of(target).stride
    where = {"vram": "450MB", "slots": 9, "pin": 6 * stride + 5, "home": tmp_path}
    found = forecast(*packs, **where)
    assert (found.plan.slots, found.plan.ram_places) == (9, 6) and found.plan.has_tier
    assert 0 < found.speed.disk_share < 1 and found.plain_speed.disk_copies > 0
    figures = {figure.name: figure for figure in found.figures}
    assert figures["disk"].value == forecasts.DISK and "--disk" in figures["disk"].source
    assert "PCIe" in figures["link"].source
    (note,) = [note for note in found.notes if "disk" in note]
    assert "6 of 24 experts" in note
    given = forecast(*packs, **where, disk=0.5)
    assert given.speed.copy_ms > found.speed.copy_ms
    fits = forecast(*packs, **where | {"slots": 18})
    assert fits.speed.disk_copies == 0
    args = ["plan", target, "--draft", draft, "--vram", "450MB", "--slots", "9", "--pin"]
    assert spmoe(*args, str(6 * stride)) == 0
    out, err = capsys.readouterr()
    assert re.search(r"^experts in slots and RAM +15 +15$", out, re.MULTILINE)
    assert re.search(r"^of them read from disk +[\d.]+ \(60%\) +[\d.]+ \(60%\)$", out, re.MULTILINE)
    assert "disk: 3 GB/s, assumed" in err
    assert spmoe(*args, str(6 * stride), "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["plan"]["ram_places"] == 6
    assert values["speed"]["disk_share"] == pytest.approx(0.6)
    assert spmoe(*args, "none") == 0
    assert "read from disk" not in capsys.readouterr().out
    whole = forecast(*packs, **where | {"pin": 20 * stride})
    assert whole.plan.has_tier and whole.plan.held == 24 and "disk" not in str(whole.figures)
    assert not any("disk" in note for note in whole.notes)


def test_what_the_page_cache_does_not_hold_comes_from_disk(packs, monkeypatch, tmp_path):
    target, draft = packs
    stride, free = size_of(target).stride, []
    monkeypatch.setattr(forecasts, "available_bytes", lambda device: free[-1])
    where = {"vram": "450MB", "slots": 9, "pin": "none", "home": tmp_path}
    for experts, held in [(24, None), (15, 15), (4, 9)]:
        free.append(experts * stride + 100)
        found = forecast(target, draft, **where)
        share = 0 if held is None else (24 - held) / (24 - 9)
        assert found.speed.disk_share == pytest.approx(share)
        assert any(f"holds {held} of 24 experts" in note for note in found.notes) == bool(held)
    free.append(10 << 30)
    notes = forecast(target, draft, **where, disk=1.0).notes
    assert any(note.startswith("--disk has no effect") for note in notes)
    free.append(10 << 30)
    notes = forecast(target, device="cpu", pin=5, acceptance=0.5, home=tmp_path).notes
    assert any(note.startswith("--pin has no effect") for note in notes)
    assert any(note.startswith("--acceptance has no effect") for note in notes)


def test_what_profile_measured_of_the_disk_is_used(packs, tmp_path):
    with Pack.open(packs[0]) as pack:
        machine = forecasts._Machine(torch.device("cpu"), True, [pack], 5, tmp_path)
        plan = forecast(packs[0], vram="450MB", slots=9, pin=6 * size_of(packs[0]).stride).plan
        for given, known, rate, source in [
            (None, None, 3e9, "assumed: NVMe"),
            (None, replace(MEASURED, disk_gbps=1.5), 1.5e9, "by profile"),
            (9.0, replace(MEASURED, disk_gbps=1.5), 9e9, "given by --disk"),
        ]:
            machine.given_disk, machine._profile = given, known
            assert machine.disk_rate(plan) == rate
            assert machine.figures[-1].source.startswith(source)
        machine._imagined, machine.given_disk = (
            False,
            None,
        )  # a tier beside a pack that RAM could hold
        assert machine.disk_rate(plan) == 5e9 and "page cache" in machine.figures[-1].source


def test_loading_makes_the_tier_that_is_planned(packs, monkeypatch):
    stride = size_of(packs[0]).stride
    monkeypatch.setattr(Loader, "_pinned", lambda self, pin, pack: 5 * stride + 7)
    with Engine.load(packs[0], device="cpu", slots=6) as engine:
        assert engine.plan.ram_places == engine.stats()["ram_places"] == 5
    with Engine.load(packs[0], device="cpu", slots=24) as engine:
        assert engine.plan.ram_places == 0


def test_acceptance_and_its_mean_are_inverse():
    for a in (0.0, 0.3, 0.95, 1.0):
        assert acceptance(mean_accepted(a, 4), 4) == pytest.approx(a, abs=1e-6)


def test_what_was_measured_here_is_used_and_flags_come_first(packs, tmp_path):
    save_profile(profile_path(["target", packs[1].stem], HERE, tmp_path), MEASURED)
    where = {"device": "cpu", "home": tmp_path, "vram": "8MB", "slots": 12}
    found = forecast(*packs, **where)
    assert found.speed.drafting_ms == 4.0 and found.speed.pass_ms == pytest.approx(1.5)
    assert found.plain_speed.pass_ms == pytest.approx(0.75)
    assert found.speed.tokens == pytest.approx(1 + mean_accepted(0.75, 4))
    assert found.speed.copy_ms == pytest.approx(2 * found.speed.copies)
    assert {figure.source for figure in found.figures} == {"by profile"}
    given = forecast(*packs, **where, acceptance=0.5, link=1.0)
    sources = {figure.name: figure.source for figure in given.figures}
    assert sources["link"] == "given by --link"
    assert sources["draft tokens accepted"] == "given by --acceptance"
    assert given.plan.read_rate == 1e9
    alone = forecast(packs[0], device="cpu", home=tmp_path)
    assert alone.plain_plan is None and alone.verdict() == ""


def test_what_is_assumed_says_so_and_names_its_flag(packs):
    found = forecast(*packs, vram="450MB", slots=6)
    assert {"link", "draft tokens accepted"} <= {figure.name for figure in found.figures}
    for figure in found.figures:
        assert figure.source.startswith("assumed") and "--" in figure.source
    assert found.notes


def test_it_says_which_is_faster_and_why(packs, tmp_path):
    path = profile_path(["target", packs[1].stem], HERE, tmp_path)
    where = {"device": "cpu", "home": tmp_path, "vram": "6.3MB"}
    save_profile(path, replace(MEASURED, acceptance=1.0, expert_copy_ms=0.0, plain_layer_ms=9.0,
                               target_layer_ms=9.0))  # fmt: skip
    fast = forecast(*packs, **where)
    assert fast.draft_is_faster and fast.verdict().startswith("the draft makes it faster")
    save_profile(path, replace(MEASURED, acceptance=0.0))
    slow = forecast(*packs, **where)
    assert slow.draft_is_faster is False
    lost = slow.plain_plan.slots - slow.plan.slots
    assert lost > 0 and f"take the room of {lost} experts" in slow.verdict()
    assert "without the draft is faster" in slow.verdict()
    assert "--draft-tokens" not in slow.verdict()  # no number of drafts helps
    cheap = {"expert_copy_ms": 1e-6, "draft_token_ms": 0.1}
    save_profile(path, replace(MEASURED, acceptance=0.9, **cheap))
    few = forecast(*packs, **where, draft_tokens=1)
    assert few.best_speed.draft_tokens > 1
    assert f"--draft-tokens {few.best_speed.draft_tokens} would take" in few.verdict()
    save_profile(path, Profile(1e-6, 1e-6, 1.0, 1.0, 5, 1.0, None, 0.0))
    assert forecast(*packs, **where).draft_is_faster is None


# --- the command


def test_the_command_shows_both_ways(packs, capsys):
    target, draft = packs
    assert spmoe("plan", target, "--draft", draft, "--vram", "450MB", "--slots", "9") == 0
    out, err = capsys.readouterr()
    assert re.search(r"^ON CUDA +WITH DRAFT +WITHOUT$", out, re.MULTILINE)
    assert re.search(r"^experts in slots +9 of 24 +9 of 24$", out, re.MULTILINE)
    assert re.search(r"^draft +\S+ \w+ +-$", out, re.MULTILINE)
    assert re.search(r"^ms a token +\S+ +\S+$", out, re.MULTILINE)
    assert "faster" in out.splitlines()[-1]
    assert "link: 25 GB/s, assumed" in err and "draft tokens accepted: 70%, assumed" in err


def test_the_command_gives_every_figure_as_json(packs, capsys):
    target, draft = packs
    assert spmoe("plan", target, "--draft", draft, "--vram", "450MB", "--slots", "9", "--json") == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    assert out.isascii() and found["plan"]["slots"] == 9
    assert found["faster"] in ("draft", "no draft", None) and found["verdict"]
    assert found["without_draft"]["plan"]["draft_bytes"] == 0
    assert found["speed"]["token_ms"] > 0
    assert {"name", "value", "unit", "source"} == set(found["figures"][0])
    assert spmoe("plan", draft, "--json") == 0  # a dense model: memory alone
    assert json.loads(capsys.readouterr().out)["speed"] is None


def test_what_does_not_fit_is_4_and_its_advice_works(packs, capsys):
    target, draft = packs
    args = ["plan", target, "--draft", draft, "--device", "cpu", "--vram", "3.8MB"]
    assert spmoe(*args) == 4
    (line,) = capsys.readouterr().err.splitlines()
    advice = re.findall(r"(?:raise|lower) (--\S+) to (\S+)", line)
    assert advice
    for flag, value in advice:
        assert spmoe(*args, flag, value) == 0
    if "use --kv-type int8" in line:
        assert spmoe(*args, "--kv-type", "int8") == 0
    assert spmoe("plan", target.with_name("none.spmoe")) == 3
    assert spmoe("plan", target, "--acceptance", "2") == 2
    assert spmoe("plan", target, "--link", "fast") == 2
    assert forecasts.ACCEPTANCE == 0.7  # as the manual says


@pytest.mark.parametrize(
    "value, shown",
    [(0.4851, "0.485"), (29.94, "29.9"), (999.4, "999"), (999.6, "1000"), (2558.1, "2558")],
)
def test_figures_are_shown_without_an_exponent(value, shown):
    assert digits(value) == shown
