"""Tuning with made-up times: what is tried, kept, written and believed; and which bits a tile may not change."""

import contextlib
import json
import logging
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spmoe_lite import cli, loading, timing, tune
from spmoe_lite.engine import Engine
from spmoe_lite.errors import Cancelled, NotFoundError, UnsupportedError
from spmoe_lite.kernels import configs
from spmoe_lite.pack import Pack
from spmoe_lite.precision import scheme_of
from spmoe_lite.timing import Bench, Product
from spmoe_lite.tune import Card, candidates, tune_all, tune_product
from tests.make_pack import WIDE, Weights

H200 = Card((9, 0), "NVIDIA H200", "3.9.0", "a hash")
CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)]
PRODUCTS = [
    Product(kind, dtype, weights)
    for kind in ("up", "down", "dense")
    for dtype, weights in (
        ("bf16", "bf16"), ("fp32", "fp32"), ("fp16", "int4-g128z"), ("bf16", "int8-g64"),
    )
]  # fmt: skip
UP, DENSE = Product("up", "bf16", "bf16"), Product("dense", "bf16", "int4-g64z")


@pytest.fixture(autouse=True)
def no_tiles_left():
    yield
    configs.TUNED.clear()


class Stand:
    """Stands for a bench: time and bits of a product as functions of the tile a launch would take."""

    def __init__(self, product, card=H200, ms=lambda tile: 1.0, bits=lambda tile: 7):
        self.product, self.card, self.ms, self.bits, self.seen = product, card, ms, bits, []

    def tile(self, rows):
        capability, dtype, kind, scheme = self.product.key(self.card.capability)
        return configs.tile(capability, dtype, kind, rows, scheme)

    def results(self, rows):
        self.seen.append((rows, self.tile(rows)))
        return [torch.tensor([self.bits(self.tile(rows))])]

    def milliseconds(self, rows):
        return self.ms(self.tile(rows))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_what_is_tried_cannot_change_the_order_of_a_sum(product, capability):
    for shipped in configs.shipped(*product.key(capability)):
        tried = candidates(product, shipped)
        assert tried and shipped not in tried and len(set(tried)) == len(tried)
        for tile in tried:
            assert tile.t == shipped.t and 256 % tile.k == 0  # SEGMENT_STEP of linear_triton
            if product.kind == "dense" and shipped.t == configs.FEW:
                assert tile.n == shipped.n
            if (
                capability == (9, 0) and product.dtype != "fp32"
            ):  # or wgmma for some, not for others
                assert tile.n % 64 == 0 and tile.warps % 4 == 0


def test_every_tile_is_compared_at_the_edges_of_its_bucket_and_a_wrong_one_is_dropped():
    wrong = replace(configs.shipped(*UP.key((9, 0)))[1], stages=5)
    fast = Stand(
        UP, ms=lambda tile: 0.1 if tile == wrong else 1.0, bits=lambda tile: int(tile == wrong)
    )
    tried = tune_product(UP, (9, 0), fast)
    assert kept_of(tried) == [] and [t.verdict for t in tried if t.tile == wrong] == ["other bits"]
    assert {1, 16, 17, 32, 33, 64, 65, 128, 257} <= {rows for rows, _ in fast.seen}
    for one in tried:
        if one.verdict != "other bits":
            assert len({rows for rows, tile in fast.seen if tile == one.tile}) >= 2


def test_negative_zero_is_another_bit_and_a_nan_is_its_own_equal():
    zero, nan = torch.tensor([0.0]), torch.tensor([float("nan")])
    assert not tune._equal([zero], [-zero])
    assert tune._equal([nan], [nan.clone()])


@pytest.mark.parametrize(("ms", "wins"), [(0.96, True), (0.98, False), (1.0, False), (2.0, False)])
def test_three_percent_decide(ms, wins):
    shipped = configs.shipped(*UP.key((9, 0)))
    better = replace(shipped[0], stages=shipped[0].stages + 1)
    tried = tune_product(UP, (9, 0), Stand(UP, ms=lambda t: ms if t == better else 1.0))
    assert kept_of(tried) == [better] * wins
    assert [t.tile for t in tried if t.verdict == "shipped"] == list(shipped)
    assert not configs.TUNED  # used from the next load on


def test_a_shipped_tile_that_was_timed_slow_once_is_not_replaced():
    slow = iter([9.0, 9.0])  # the first bucket is timed at two numbers of rows
    shipped = configs.shipped(*UP.key((9, 0)))[0]
    times = Stand(UP, ms=lambda t: next(slow, 1.0) if t == shipped else 1.0)
    assert kept_of(tune_product(UP, (9, 0), times)) == []


def test_a_tile_that_does_not_run_is_skipped_and_says_why():
    def ms(tile):
        if tile.n == 128:
            raise RuntimeError("out of resource: shared memory\nand more")
        return 1.0 if tile.stages < 5 else 0.5

    shipped = configs.shipped(*DENSE.key((9, 0)))
    tried = tune_product(DENSE, (9, 0), Stand(DENSE, ms=lambda t: 1.0 if t in shipped else ms(t)))
    dropped = [t for t in tried if t.ms is None]
    assert dropped and all("out of resource: shared memory" in t.verdict for t in dropped)
    kept = kept_of(tried)
    assert kept and all(t.stages >= 5 for t in kept)


def kept_of(tried):
    return [one.tile for one in tried if one.verdict == "kept"]


def keep(home, product=UP, card=H200, **changes):
    """Tune one product so that more stages win everywhere; the tiles that are in use then."""
    ms = lambda t: 1.0 / t.stages  # noqa: E731
    return tune_all({product: lambda: Stand(product, card, ms)}, card, home)


def test_what_was_kept_is_used_after_the_next_load_and_nothing_else_changes(tmp_path):
    tried, path = keep(tmp_path)
    kept = kept_of(tried)
    assert len(kept) == 4 and path.parent == tmp_path / "tuned"
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary file
    before = configs.shipped(*UP.key((9, 0)))
    tune.load(torch.device("cpu"), tmp_path, H200)
    assert configs.tiles(*UP.key((9, 0))) == tuple(kept) != before
    assert configs.tile((9, 0), torch.bfloat16, "up", 17) == kept[1]
    assert configs.tiles(*UP.key((8, 0))) == configs.shipped(*UP.key((8, 0)))
    assert configs.tiles(*DENSE.key((9, 0))) == configs.shipped(*DENSE.key((9, 0)))
    keep(tmp_path, DENSE)  # another pack: what the first one found stays
    tune.load(torch.device("cpu"), tmp_path, H200)
    assert configs.tiles(*UP.key((9, 0))) == tuple(kept)
    assert configs.tiles(*DENSE.key((9, 0))) != configs.shipped(*DENSE.key((9, 0)))
    tune.load(torch.device("cpu"), tmp_path / "empty", H200)
    assert not configs.TUNED


@pytest.mark.parametrize("field", ["capability", "card", "triton", "sources"])
def test_a_file_of_other_kernels_or_of_another_card_is_ignored_with_one_line(
    field, tmp_path, caplog
):
    _, path = keep(tmp_path)
    found = json.loads(path.read_text())
    found[field] = [8, 0] if field == "capability" else "another"
    path.write_text(json.dumps(found))
    with caplog.at_level(logging.WARNING, "spmoe_lite"):
        tune.load(torch.device("cpu"), tmp_path, H200)
    assert not configs.TUNED
    assert len(caplog.messages) == 1 and str(path) in caplog.messages[0]


def test_a_damaged_file_never_breaks_loading(tmp_path, caplog):
    _, path = keep(tmp_path)
    good = json.loads(path.read_text())
    bad = ["", "[]", "null", "\0", "[" * 100_000, json.dumps({**good, "tiles": 3})]
    for key, value in [
        ("n", 1 << 40),
        ("n", "64"),
        ("k", None),
        ("t", 0),
        ("stages", -1),
        ("x", 1),
    ]:
        tile = {**good["tiles"][0]["tile"], key: value}
        bad.append(json.dumps({**good, "tiles": [{**good["tiles"][0], "tile": tile}]}))
    for key, value in [
        ("kind", "sideways"),
        ("kind", []),
        ("dtype", "int3"),
        ("weights", "int4-g1"),
    ]:
        product = {**good["tiles"][0]["product"], key: value}
        bad.append(json.dumps({**good, "tiles": [{**good["tiles"][0], "product": product}]}))
    for text in bad:
        path.write_text(text)
        caplog.clear()
        tune.load(torch.device("cpu"), tmp_path, H200)
        assert not configs.TUNED, text[:200]
        assert len(caplog.messages) == 1
    path.write_bytes(b"\xff\xfe{")
    tune.load(torch.device("cpu"), tmp_path, H200)
    path.unlink()
    path.mkdir()
    tune.load(torch.device("cpu"), tmp_path, H200)
    assert not configs.TUNED


def test_numbers_are_those_of_the_table_however_they_are_spelt(tmp_path):
    _, path = keep(tmp_path)
    path.write_text(path.read_text().replace('"n": 64', '"n": 64.0'))
    tune.load(torch.device("cpu"), tmp_path, H200)
    assert all(type(tile.n) is int for tile in configs.tiles(*UP.key((9, 0))))


def test_the_n_that_decides_the_segments_is_not_believed_from_a_file(tmp_path):
    _, path = keep(tmp_path, DENSE)
    shipped = configs.shipped(*DENSE.key((9, 0)))[0]
    tune.write(path, H200, {DENSE: [replace(shipped, n=2 * shipped.n)]})
    tune.load(torch.device("cpu"), tmp_path, H200)
    assert configs.tile((9, 0), torch.bfloat16, "dense", 1, scheme_of("int4-g64z")) == shipped


def test_a_cancel_leaves_the_products_that_were_done(tmp_path):
    cancel, steps = threading.Event(), []
    per_product = sum(len(candidates(UP, s)) for s in configs.shipped(*UP.key((9, 0))))

    def progress(report):
        steps.append(report)
        if report.done > per_product + 3:
            cancel.set()

    ms = lambda t: 1.0 / t.stages  # noqa: E731
    made = {p: lambda p=p: Stand(p, ms=ms) for p in (UP, DENSE)}
    with pytest.raises(Cancelled):
        tune_all(made, H200, tmp_path, cancel, progress)
    assert [s.done for s in steps] == list(range(len(steps))) and steps[-1].done < steps[-1].total
    assert set(tune.read(H200.path(tmp_path), H200)) == {UP}
    assert not configs.TUNED and not list(tmp_path.rglob("*.tmp"))


def test_real_kernels_interpreted_give_equal_bits_where_only_the_schedule_differs(device):
    linear_triton = pytest.importorskip("spmoe_lite.kernels.linear_triton").linear_triton
    x, weight = torch.randn(260, 256, device=device), torch.randn(40, 256, device=device)
    bench = Bench([[lambda rows: linear_triton(x[:rows], weight)]])
    bench.milliseconds = lambda rows: 1.0
    product, capability = Product("dense", "fp32", "fp32"), configs.capability_of(x)
    tried = tune_product(product, capability, bench)
    assert kept_of(tried) == [] and not [t for t in tried if "does not run" in t.verdict]
    schedule = [t for t in tried if t.tile.n == 32 and t.tile.k == 32]
    assert len(schedule) > 4 and all(t.verdict in ("shipped", "slower") for t in schedule)
    whole, key = bench.results, product.key(capability)
    bench.results = lambda rows: [  # noqa: E731
        y + (configs.tiles(*key) != configs.shipped(*key)) * 1e-6 for y in whole(rows)
    ]
    tried = tune_product(product, capability, bench)
    assert {t.verdict for t in tried} == {"shipped", "other bits"}


@pytest.mark.parametrize("dtype", ["fp32", "int4-g32z"])
def test_the_products_of_a_pack_run_at_its_shapes(dtype, tmp_path, device, monkeypatch):
    weights = Weights(WIDE, expert_dtype=dtype, linear_dtype=dtype, embed_dtype=dtype)
    with Pack.open(weights.write(tmp_path / "p.spmoe")) as pack:
        made = timing.benches(pack, torch.device(device))
        assert {(p.kind, p.weights) for p in made} == {(k, dtype) for k in ("up", "down", "dense")}
        by_kind = {product.kind: make() for product, make in made.items()}
        assert all(len(copies) >= 2 for bench in by_kind.values() for copies in bench.shapes)
        wanted = {kind: bench.results(33) for kind, bench in by_kind.items()}
        hidden, inner, q = WIDE.hidden_size, WIDE.intermediate_size, 4 * WIDE.head_dim
        assert {kind: [tuple(y.shape) for y in ys] for kind, ys in wanted.items()} == {
            "up": [(33, 2, inner)],
            "down": [(33, 2, hidden)],
            "dense": [(33, 2 * q), (33, hidden), (33, WIDE.vocab_size)],
        }
        triton = pytest.importorskip("spmoe_lite.kernels.expert_gemm_triton")
        monkeypatch.setattr(timing, "expert_up", triton.expert_up_triton)
        monkeypatch.setattr(timing, "expert_down", triton.expert_down_triton)
        for kind in ("up", "down"):
            bench = timing.expert_bench(
                kind, pack.expert_layout, 2, torch.float32, torch.device(device)
            )
            (got,) = bench.results(33)
            assert got.shape == wanted[kind][0].shape and torch.isfinite(got).all()
            assert got.std() > 0 and torch.equal(bench.results(1)[0][0], got[0])


def test_the_command_shows_what_was_tried_and_kept(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path))
    Weights(WIDE, expert_dtype="fp32").write(tmp_path / "p.spmoe")
    monkeypatch.setattr(tune, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(tune, "current", lambda place: contextlib.nullcontext())
    monkeypatch.setattr(tune, "check_experts", lambda *given: None)
    monkeypatch.setattr(Card, "of", lambda place: H200)
    made = {UP: lambda: Stand(UP, ms=lambda t: 1.0 / t.stages)}
    monkeypatch.setattr(tune, "benches", lambda pack, place: made)
    assert cli.run_command(["tune", "p"]) == 0
    out, err = capsys.readouterr()
    first, *lines = out.splitlines()
    assert first.split() == ["PRODUCT", "ROWS", "N", "K", "WARPS", "STAGES", "US", "RESULT"]
    assert sum(line.endswith("kept") for line in lines) == 4
    assert f"kept in {H200.path(None)}" in err.splitlines()[-1] and H200.path(None).is_file()
    assert cli.run_command(["tune", "p", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["file"] == str(H200.path(None)) and len(found["tried"]) == len(lines)


def test_an_engine_on_a_gpu_reads_the_file_before_its_kernels_run(tmp_path, monkeypatch):
    pytest.importorskip("triton", reason="Triton is declared for Linux only")

    class Read(Exception):
        pass

    def load(place, home):
        raise Read(place.type, home)

    monkeypatch.setattr(tune, "load", load)
    monkeypatch.setattr(loading, "choose_device", torch.device)
    with pytest.raises(Read, match="cuda"):
        Engine.load("none", device="cuda", home=tmp_path)
    with pytest.raises(NotFoundError):
        Engine.load("none", device="cpu", home=tmp_path)


def test_a_card_is_known_by_its_name_triton_and_every_kernel_source(tmp_path, monkeypatch):
    triton = pytest.importorskip("triton", reason="Triton is declared for Linux only")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A/B: 100 %")
    card = Card.of(torch.device("cuda"))
    assert (card.capability, card.card, card.triton) == ((9, 0), "A/B: 100 %", triton.__version__)
    assert card.path(tmp_path).parent == tmp_path / "tuned" and " " not in card.path(tmp_path).name
    folder = tmp_path / "kernels"
    shutil.copytree(Path(configs.__file__).parent, folder)
    monkeypatch.setattr(configs, "__file__", str(folder / "configs.py"))
    assert Card.of(torch.device("cuda")) == card
    for name in ("tile_triton.py", "configs.py"):
        (folder / name).write_text((folder / name).read_text(encoding="utf-8") + "\n", "utf-8")
        changed = Card.of(torch.device("cuda"))
        assert changed.sources != card.sources
        card = changed


@pytest.mark.gpu
def test_on_a_gpu_what_runs_is_timed_and_schedules_keep_the_bits(tmp_path, monkeypatch):
    """One other tile for each product, prefill's for up and decode's for the others: compiling takes long."""
    shipped = configs.shipped
    monkeypatch.setattr(
        configs,
        "shipped",
        lambda *key: shipped(*key)[-1:] if "up" in key else shipped(*key)[:1],
    )
    monkeypatch.setattr(tune, "MOVES", ((1, 0, 1, 0), (0, 0, 0, 1)))
    monkeypatch.setattr(tune, "candidates", lambda *given: candidates(*given)[:1])
    dense = "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp16"
    Weights(WIDE, dense, "int4-g64z", embed_dtype="int8-g64").write(tmp_path / "p.spmoe")
    tried, path = tune.tune("p", home=tmp_path)
    assert [t.product.kind for t in tried] == ["up", "up", "down", "down", "dense", "dense"]
    assert all(t.ms > 0 for t in tried if t.verdict in ("shipped", "slower", "kept"))
    assert not [t for t in tried if t.verdict == "other bits"]
    read = tune.read(path, Card.of(torch.device("cuda")))
    assert sum(read.values(), []) == kept_of(tried)


def test_without_a_gpu_it_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Weights(WIDE, expert_dtype="fp32").write(tmp_path / "p.spmoe")
    assert cli.run_command(["tune", "p"]) == UnsupportedError.exit_code
    assert (
        capsys.readouterr().err == "spmoe-lite: tune needs a CUDA GPU: it times the GPU's kernels\n"
    )
    assert not (tmp_path / "tuned").exists()
