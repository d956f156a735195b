"""`bench`: which rows run, what runs become in a row, and the command over tiny packs."""

import errno
import json
import re
import signal
import threading
from pathlib import Path

import pytest

from spmoe_lite import bench as b
from spmoe_lite import cli, library, prompts, synthetic
from spmoe_lite.errors import Cancelled, CapacityError, DamagedError, UsageError
from spmoe_lite.progress import check
from spmoe_lite.stats import Counters, RunStats
from tests.tiny import tiny_pack

PROMPT_LINES = "the quick brown fox\nit was said that\n"


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")  # so that `main` leaves the environment alone


def run(prompt=0, repeat=1, ms=10.0, tokens=20, ids=(5, 6), **counted):
    counters = Counters(tokens=tokens, **counted)
    return b.Run(prompt, repeat, RunStats(tokens + 1, ms * tokens / 1e3, 0.5, counters), ids)


def row(policy, ms, *, slots=8, drafts=0, asked=8, runs=None):
    setting = b.Setting(policy, slots, drafts)
    runs = runs or [run(repeat=0, ms=900)] + [run(repeat=i, ms=ms) for i in (1, 2)]
    return b.make_row(setting, runs, runs, asked=asked, steps="", notices=())


def test_figures_are_sums_over_the_runs_that_count():
    runs = [
        run(repeat=0, ms=500, bytes_moved=10**9),
        run(repeat=1, ms=10, tokens=10, bytes_moved=10**6, accesses=4, access_hits=1, drafted=8),
        run(repeat=2, ms=30, tokens=30, bytes_moved=3 * 10**6, accesses=4, access_hits=2),
        run(repeat=3, ms=20, tokens=0, stall_seconds=0.25, unique=2, unique_hits=2, accepted=4),
    ]
    found = b.make_row(b.Setting("ours", 8, 4), runs, runs[:1], asked=8, steps="", notices=())
    assert found.tpot_ms == pytest.approx((20, 10, 30))  # a run that wrote one text has none
    figures = found.to_dict()
    assert figures["tokens_per_second"] == pytest.approx(40)  # 10 x 10 ms and 30 x 30 ms
    assert figures["mb_per_token"] == 0.1
    assert figures["hit_rate"] == 3 / 8 and figures["hit_rate_unique"] == 1
    assert figures["acceptance"] == 0.5 and figures["stall_share"] == pytest.approx(0.25)
    assert figures["time_to_first_token"] == 0.5 and found.error is None
    json.dumps(figures, allow_nan=False)


@pytest.mark.parametrize("repeat", [0, 1])
def test_another_text_is_an_error_and_is_not_ranked(repeat):
    first = [run(prompt=p, repeat=0, ids=(p, 7)) for p in (0, 1)]
    runs = [run(prompt=p, repeat=r, ms=1, ids=(p, 7)) for r in (0, 1) for p in (0, 1)]
    runs[2 * repeat + 1] = run(prompt=1, repeat=repeat, ms=1, ids=(1, 7, 8))
    bad = b.make_row(b.Setting("ours", 8, 4), runs, first, asked=8, steps="", notices=())
    assert bad.error == "another text than the first row's, prompt 2"
    good = row("on-demand", 10)
    assert b.sort_rows([bad, good]) == [good, bad]
    assert "ours" not in b.summary([bad, good])


def test_rows_are_sorted_and_the_sentence_takes_on_demand_at_its_best():
    silent = row("ours", 1, runs=[run(repeat=i, tokens=0) for i in (0, 1)])
    rows = [
        silent,
        row("on-demand", 40),
        row("on-demand", 30, drafts=4),
        row("on-demand", 25, slots=12, asked=12),
        row("ours", 20, drafts=4),
        row("all-resident", 10, slots=16, asked=16),
    ]
    ordered = b.sort_rows(rows)
    times = [one.tpot_ms and round(one.tpot_ms[0]) for one in ordered]
    assert times == [10, 20, 25, 30, 40, None]
    assert b.summary(rows[:5]) == (
        "fastest: ours, 8 slots, 4 drafts, 20.0 ms a token, 1.50 times as fast as on-demand, "
        "8 slots, 4 drafts (30.0 ms), ahead in 2 of 2 runs"
    )
    assert b.summary(rows) == (
        "fastest: all-resident, 16 slots, no drafts, 10.0 ms a token, 2.50 times as fast as "
        "on-demand, 12 slots, no drafts (25.0 ms), ahead in 2 of 2 runs; of those that page: "
        + b.summary(rows[:5]).removeprefix("fastest: ")
    )
    assert b.summary(rows[1:3]) == (
        "fastest: on-demand, 8 slots, 4 drafts, 30.0 ms a token, 1.33 times as fast as on-demand, "
        "8 slots, no drafts (40.0 ms), ahead in 2 of 2 runs"
    )
    assert b.summary(rows[1:2]).endswith("40.0 ms a token")
    assert b.summary([silent]).startswith("nothing to compare")


def test_the_first_row_is_on_demand_without_drafting():
    base = b.Setting("on-demand", 8, 0)
    assert b.plan_rows(["ours"], [8], [4], 16, True) == [base, b.Setting("ours", 8, 4)]
    assert b.plan_rows(["sp-moe", "static"], [8], [0], 16, True) == [
        base,
        b.Setting("static", 8, 0),
    ]
    rows = b.plan_rows(b.USUAL, [8, 12], [], 16, True)
    assert rows[0] == base and len(rows) == len(set(rows)) == 2 * 5 + 2
    assert [one for one in rows if one.policy == "all-resident"] == [
        b.Setting("all-resident", 16, n) for n in (0, 4)
    ]
    assert b.Setting("ours", 8, 0) not in rows
    assert {one.draft_tokens for one in b.plan_rows(b.USUAL, [], [], 16, False)} == {0}
    assert b.plan_rows(b.USUAL, [], [], 16, False)[0].slots is None
    sizes = b.plan_rows(["on-demand", "ours"], [], [4], 16, True, ["1GiB", "0.5"])
    assert [(one.policy, one.draft_tokens, one.vram) for one in sizes] == [
        ("on-demand", 0, "1GiB"),
        ("on-demand", 4, "1GiB"),
        ("ours", 4, "1GiB"),
        ("on-demand", 4, "0.5"),
        ("ours", 4, "0.5"),
    ]
    assert str(sizes[2]) == "ours, 1GiB of slots, 4 drafts"
    with pytest.raises(UsageError, match="^--slots and several sizes of --vram"):
        b.plan_rows(["ours"], [8], [4], 16, True, ["1GiB", "2GiB"])


@pytest.mark.parametrize(
    "policies, slots, drafts, said",
    [
        (["lru"], [], [], f"--policy lru: one of {', '.join(b.POLICIES)}"),
        (["ours"], [8, 1], [], "--slots 1: 2 to 16"),
        ([], [17], [], "--slots 17: 2 to 16"),
        ([], [], [32], "--draft-tokens 32: 0 to 31, or auto"),
    ],
)
def test_bad_values_are_named(policies, slots, drafts, said):
    with pytest.raises(UsageError, match=f"^{said}$"):
        b.plan_rows(policies, slots, drafts, 16, True)


def test_drafting_needs_a_draft():
    with pytest.raises(UsageError, match="^--draft-tokens 4: name the pack .* --draft$"):
        b.plan_rows(b.POLICIES, [], [4], 16, False)


def test_prompts_are_lines_or_json_lines():
    assert prompts.parse_prompts(" a b\n\n{c: 1}\n", "f") == [" a b", "{c: 1}"]
    assert prompts.parse_prompts('{"prompt": "a\\nb"}\n\n{"prompt": "c"}', "f") == ["a\nb", "c"]
    with pytest.raises(UsageError, match="f, line 3: no JSON object"):
        prompts.parse_prompts('{"prompt": "a"}\n\n{"text": "c"}', "f")
    for first in ('{"prompt": 5}', '{"text": "a"}', '{"prompt": ""}', "{}"):
        with pytest.raises(UsageError, match="f, line 1: no JSON object"):
            prompts.parse_prompts(first, "f")
    with pytest.raises(UsageError, match="f holds no prompt"):
        prompts.parse_prompts(" \n\n", "f")
    for text in ('{"prompt":"\\ud800"}', "{", '{\n"prompt": "a"}', '{"prompt": null}'):
        with pytest.raises(UsageError, match="^f, line 1: no JSON object"):
            prompts.parse_prompts(text, "f")
    odd = "a\u2028b\x0cc\x85d"
    assert prompts.parse_prompts(f'{{"prompt": "{odd}"}}'.replace("\x0c", ""), "f") == [
        "a\u2028bc\x85d"
    ]
    assert prompts.parse_prompts(f"{odd}\r\ne\r\n", "f") == [odd, "e"]


class Engine:
    """Writes two tokens an answer, one a piece; a third where it drafts and `wrong` is set."""

    template, wrong, most, device, store = None, False, 12, "cpu", None
    loaded: list["Engine"] = []

    @classmethod
    def load(cls, target, draft, *, on_plan, slots, cancel, on_progress, **given):
        if slots is not None and slots > cls.most:
            raise CapacityError("too many")
        engine = cls()
        engine.slots, engine.drafts, engine.draft = slots or cls.most, given["draft_tokens"], draft
        engine.counters, engine.closed, engine.asked = Counters(), False, []
        engine.decoder = engine.session = engine.target_kv = engine  # who is asked to truncate
        engine.draft_kv, engine.given, engine.plan = None, given, engine
        on_plan(engine)
        cls.loaded.append(engine)
        return engine

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def truncate(self, length):
        assert length == 0
        self.asked.append(None)

    def stats(self):
        return {"slots": self.slots, "steps": "driven by the host", "notices": ["said"]}

    def generate(self, prompt, *, sampling, max_tokens, cancel):
        self.asked.append(prompt)
        assert sampling.temperature == 0
        return Answer(self, (1, 2, 3) if self.wrong and self.drafts else (1, 2), cancel)


class Answer:
    def __init__(self, engine, tokens, cancel):
        self.engine, self.left, self.token_ids, self.cancel = engine, list(tokens), tokens, cancel
        self.finish_reason = "stop"

    def __next__(self):
        if self.cancel is not None and self.cancel.is_set():
            self.finish_reason = "cancelled"
            raise StopIteration
        if not self.left:
            raise StopIteration
        self.left.pop()
        self.engine.counters.tokens += 1
        return "x"

    def __iter__(self):
        return self

    @property
    def result(self):
        for _ in self:
            pass
        return self


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(b, "Engine", Engine)
    monkeypatch.setattr(Engine, "loaded", [])
    monkeypatch.setattr(library, "inspect", lambda path: {"experts": 16})
    return Engine


def measured(draft=True, **given):
    pack = Path("mix.spmoe")
    return b.bench(pack, Path("dr.spmoe") if draft else None, prompts=["p", "q"], **given)


def test_every_row_is_a_fresh_engine_that_reads_each_prompt_anew(engine):
    progress, rows = [], []
    found = measured(slots=[8], repeats=2, on_progress=progress.append, on_row=rows.append)
    assert len(found.rows) == len(rows) == len(engine.loaded) == 5
    assert all(one.closed for one in engine.loaded)
    assert all(one.asked == [None, "p", None, "q"] * 2 for one in engine.loaded)
    assert [one.draft is None for one in engine.loaded] == [True, False] * 2 + [False]
    assert [one.given["prefetch"] for one in engine.loaded] == [False] * 4 + [True]
    policies = [one.given["policy"] for one in engine.loaded]
    assert policies == ["layer-lru"] * 2 + ["global-lru"] * 2 + ["layer-lru"]
    assert found.left_out == {
        f"all-resident, 16 slots, {n}": "too many" for n in ("no drafts", "4 drafts")
    }
    assert [p.done for p in progress[:6]] == [0, 1, 2, 3, 4, 5] and progress[0].total == 7 * 4
    assert {run.stats.counters.tokens for one in found.rows for run in one.runs} == {1}
    json.dumps(found.to_dict(), allow_nan=False)


def test_what_does_not_fit_at_all_is_the_engine_s_error(engine):
    with pytest.raises(CapacityError, match="too many"):
        measured(slots=[14])


def test_a_row_that_fails_costs_no_row_before_it(engine, monkeypatch):
    load = Engine.load.__func__

    def damaged(cls, *args, **given):
        if given["policy"] == "global-lru":
            raise DamagedError("mix.spmoe: layer 3 is damaged")
        return load(cls, *args, **given)

    monkeypatch.setattr(Engine, "load", classmethod(damaged))
    found = measured(slots=[8])
    assert len(found.rows) == 3 and "mix.spmoe: layer 3 is damaged" in found.left_out.values()


def test_where_every_expert_fits_all_policies_are_one_row(engine, monkeypatch):
    monkeypatch.setattr(Engine, "most", 16)
    found = measured()
    assert [
        str(one.setting) for one in sorted(found.rows, key=lambda r: r.setting.draft_tokens)
    ] == [
        "all-resident, 16 slots, no drafts",
        "all-resident, 16 slots, 4 drafts",
    ]
    left_out = ["on-demand, 16 slots", "global-lru, 16 slots", "ours, 16 slots"]
    assert list(found.left_out) == left_out
    only = measured(policies=[b.OURS], draft_tokens=[4])
    assert {row.setting.policy for row in only.rows} == {b.ALL}
    assert list(only.left_out) == ["on-demand, 16 slots", "ours, 16 slots"]


def test_without_a_draft_ours_is_left_out_with_a_reason(engine):
    found = measured(draft=False, slots=[8])
    assert "--draft" in found.left_out["ours"] and len(found.rows) == 2


@pytest.mark.parametrize("after", ["load", "answer"])
def test_stopping_keeps_the_rows_so_far(engine, after, monkeypatch):
    cancel = threading.Event()
    if after == "load":
        found = measured(slots=[8], cancel=cancel, on_row=lambda row: cancel.set())
    else:
        begin = Engine.generate

        def generate(self, *args, **given):
            if len(Engine.loaded) == 2 and len(self.asked) == 3:
                cancel.set()
            return begin(self, *args, **given)

        monkeypatch.setattr(Engine, "generate", generate)
        found = measured(slots=[8], cancel=cancel)
    assert found.interrupted and len(found.rows) == 1
    assert all(one.closed for one in engine.loaded)


def spmoe(*args):
    with pytest.raises(SystemExit) as stop:
        cli.main(list(args))
    return stop.value.code


@pytest.fixture
def found_packs(engine, monkeypatch):
    monkeypatch.setattr(library, "find", lambda name, home=None: Path(f"{name}.spmoe"))


def test_a_row_with_another_text_is_exit_code_1(found_packs, monkeypatch, capsys):
    monkeypatch.setattr(Engine, "wrong", True)
    assert spmoe("bench", "mix", "--draft", "dr", "--slots", "8", "--policy", "on-demand,ours") == 1
    out, err = capsys.readouterr()
    assert sorted(line.split()[0] for line in out.splitlines()[1:4]) == [
        "on-demand",
        "on-demand",
        "ours",
    ]
    assert out.splitlines()[1].split()[2] == "0"  # the one that may be ranked
    assert "spmoe-lite: ours, 8 slots, 4 drafts: another text than the first row's, prompt 1" in err
    assert err.count("on-demand: said") == err.count("ours: said") == 1  # once a policy


@pytest.mark.parametrize(("signum", "times"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_ctrl_c_or_sigterm_prints_the_rows_so_far_and_is_130(
    found_packs, monkeypatch, capsys, tmp_path, signum, times
):
    """SIGTERM may come twice: `timeout` sends it to the process and to its group."""
    begin, before = b.measure, signal.getsignal(signum)

    def measure(*args, **how):
        if len(Engine.loaded) == 2:
            for _ in range(times):
                signal.raise_signal(signum)
            check(how["cancel"])
        return begin(*args, **how)

    monkeypatch.setattr(b, "measure", measure)
    file = tmp_path / "out.json"
    assert spmoe("bench", "mix", "--slots", "8,9", "--json", str(file)) == 130
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3 and "interrupted; rows measured: 1" in err
    assert json.loads(file.read_text())["interrupted"] is True
    assert signal.getsignal(signum) is before


def test_a_file_that_cannot_be_written_costs_no_row(found_packs, monkeypatch, capsys, tmp_path):
    file = tmp_path / "old.json"
    file.write_text("old")
    args = ["bench", "mix", "--slots", "8", "--json", str(file)]

    def full(path, data):
        with open(path, "wb") as out:
            out.write(data[:9])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert spmoe(*args) == 4
    out, err = capsys.readouterr()
    assert "fastest: " in out and f"disk full: cannot write {file}" in err
    assert err.strip().endswith("; free some space and run the same command again")

    def stopped(*args, **how):
        raise Cancelled("cancelled")

    monkeypatch.setattr(b, "measure", stopped)
    assert spmoe(*args) == 130  # before the first row
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "args, said",
    [
        (["--policy", "ours", "--policy", "fast"], "--policy fast: one of on-demand,"),
        (["--prompts", "EMPTY"], "holds no prompt"),
        (["--slots", "1"], "--slots 1: 2 to 16"),
        (["--draft-tokens", "4"], "--draft-tokens 4: name the pack that drafts"),
        (["--repeats", "1"], "--repeats"),
        (["--json", "no/such/x.json"], "--json no/such/x.json: there is no folder"),
        (["--svg", "."], "--svg . is a folder: name a file"),
        (["--svg", "x.out", "--json=./x.out"], "--json and --svg both name x.out: give two files"),
        (["--vram", "1GB,"], "--vram : give a size"),
        (["--link", "1e-9"], "--link 1e-09: a rate in GB/s, 0.000001 to 1000000"),
        (["--acceptance", "0.9"], "--acceptance 0.9: with --synthetic only"),
        (["--layers", "2"], "--layers 2: with --synthetic only"),
        (["--synthetic", "tiny"], "--synthetic tiny brings its own packs: leave out mix"),
    ],
)
def test_bad_input_is_one_line(found_packs, capsys, tmp_path, args, said):
    empty = tmp_path / "empty"
    empty.write_text("\n")
    code = 3 if "--json" in args else 2
    assert spmoe("bench", "mix", *[str(empty) if a == "EMPTY" else a for a in args]) == code
    assert said in capsys.readouterr().err.splitlines()[-1] and Engine.loaded == []


def test_what_is_set_for_other_commands_refuses_no_benchmark(found_packs, monkeypatch, capsys):
    for name, value in {
        "SPMOE_POLICY": "layer-lru",  # of `run`
        "SPMOE_EXPERTS": "int4",  # of `convert`
        "SPMOE_ACCEPTANCE": "0.9",  # of `plan`
    }.items():
        monkeypatch.setenv(name, value)
    assert spmoe("bench", "mix", "--slots", "8", "--max-tokens", "8", "--repeats", "2") == 0
    out, err = capsys.readouterr()
    assert {line.split()[0] for line in out.splitlines()[1:3]} == {"on-demand", "global-lru"}
    assert "acceptance forced" not in err
    monkeypatch.setenv("SPMOE_DRAFT", "dr")
    assert spmoe("bench", "--synthetic", "tiny", "--slots", "1") == 2
    assert "--slots 1: 2 to" in capsys.readouterr().err


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    return [str(tiny_pack(folder, kind, layers=2)) for kind in ("mixtral", "mistral")]


def test_tiny_packs_write_the_same_text_in_every_row(packs, tmp_path, capsys):
    asked, file = tmp_path / "prompts", tmp_path / "out.json"
    asked.write_text(PROMPT_LINES)
    given = ["--slots", "4", "--draft-tokens", "0,2", "--prompts", str(asked), "--repeats", "2"]
    given += ["--policy", "on-demand,ours", "--policy", "all-resident", "--json", str(file)]
    target, draft = packs
    assert (
        spmoe("bench", target, "--draft", draft, "--max-tokens", "8", "--device", "cpu", *given)
        == 0
    )
    out, _ = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["POLICY", "SLOTS", "DRAFTS"] and len(lines) == 1 + 5 + 1
    assert lines[-1].startswith("fastest: ")
    found = json.loads(file.read_text())
    assert (found["target"], found["draft"], found["device"]) == ("mixtral", "mistral", "cpu")
    assert found["machine"]["torch"] and found["command"]
    times = [one["tpot_ms"] for one in found["rows"]]
    assert times == sorted(times) and all(len(one["runs"]) == 4 for one in found["rows"])
    paged = [one for one in found["rows"] if one["policy"] != "all-resident"]
    assert all(one["mb_per_token"] > 0 and one["hit_rate"] < 1 for one in paged)
    assert all(one["mb_per_token"] == 0 for one in found["rows"] if one not in paged)
    assert any(one["prefetch_useful"] for one in paged if one["policy"] == "ours")


def test_a_synthetic_pair_is_written_measured_drawn_and_deleted(tmp_path, capsys):
    files = [str(tmp_path / name) for name in ("x.json", "x.svg")]
    given = ["--experts", "fp32", "--layers", "2", "--folder", str(tmp_path / "cache")]
    given += [
        "--policy",
        "on-demand",
        "--slots",
        "8",
        "--draft-tokens",
        "0,2",
        "--acceptance",
        "0.7",
    ]
    given += ["--max-tokens", "6", "--repeats", "2", "--json", files[0], "--svg", files[1]]
    assert spmoe("bench", "--synthetic", "tiny", "--device", "cpu", *given) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split()[-1] == "STEPS" and len(out.splitlines()) == 1 + 2 + 1
    assert re.search(r"tiny and tiny-draft, random weights, 2 layers: experts of [0-9.]+ MB; ", err)
    assert "acceptance forced to 0.7: texts are nobody's" in err
    assert not (tmp_path / "cache").exists()
    found = json.loads(Path(files[0]).read_text())
    assert found["acceptance"] == 0.7 and found["draft"] == "tiny-draft"
    assert len(found["timelines"]) == 1 and "</svg>" in Path(files[1]).read_text()


@pytest.mark.parametrize(
    "given, said",
    [
        (["--policy", "fast"], "--policy fast: one of"),
        (["--slots", "99"], "--slots 99: 2 to 32"),
        (["--layers", "9"], "--layers 9: tiny has 1 to 4"),
        (["--vram", "much"], "--vram much: give a size"),
        (["--acceptance", "nan"], "--acceptance nan: 0 to 1"),
        (["--ctx-size", "4000"], "--ctx-size 4000: tiny takes 2 to 2048"),
        (["--link", "nan"], "--link nan: a rate in GB/s"),
        (["--link", "5", "--copy-path", "legacy"], "--link 5: not with --copy-path legacy"),
    ],
)
def test_what_is_wrong_is_said_before_a_synthetic_pair_is_written(tmp_path, capsys, given, said):
    assert spmoe("bench", "--synthetic", "tiny", "--folder", str(tmp_path), *given) == 2
    assert said in capsys.readouterr().err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "given",
    [["--vram", "1MB"], ["--vram", "1MB,1GB"], ["--vram", "2MB", "--slots", "32", "-c", "256"]],
)
def test_a_synthetic_pair_that_will_not_fit_is_not_written(tmp_path, monkeypatch, capsys, given):
    def fail(*args, **how):
        raise AssertionError("written")

    monkeypatch.setattr(synthetic, "write_pair", fail)
    folder = tmp_path / "cache"
    args = ["bench", "--synthetic", "tiny", "--device", "cpu", "--folder", str(folder), *given]
    assert spmoe(*args) == 4
    out, err = capsys.readouterr()
    assert not out and "may be used: " in err and len(err.splitlines()) == 1
    assert not folder.exists()


def test_a_synthetic_pair_is_refused_as_if_it_were_written(tmp_path):
    pair = synthetic.Pair.of("tiny")
    target, _ = synthetic.write_pair(pair, tmp_path)
    how = {"device": "cpu", "ctx_size": 256, "kv_type": "int8"}
    with pytest.raises(CapacityError) as refused:
        b.check_fit(pair, b.Setting("on-demand", 20, 0, "2MB"), **how)
    with pytest.raises(CapacityError, match=f"^{re.escape(str(refused.value))}$"):
        b.bench(target, slots=[20], vram="2MB", **how)
    b.check_fit(pair, b.Setting("on-demand", 20, 0, "20MB"), **how)


def test_a_prompt_without_room_is_named(packs, tmp_path, capsys):
    texts = tmp_path / "texts.txt"
    texts.write_text("short\n" + "long " * 30 + "\n")
    given = "--prompts", str(texts), "--ctx-size", "100"
    assert spmoe("bench", "--synthetic", "tiny", "--folder", str(tmp_path), *given) != 0
    err = capsys.readouterr().err
    assert "prompt 2 has 150 tokens" in err and list(tmp_path.iterdir()) == [texts]
    with pytest.raises(CapacityError, match="^prompt 2: the prompt has .* tokens, the context 40"):
        b.bench(*map(Path, packs), prompts=["a", "long " * 30], ctx_size=40, device="cpu")


def test_every_policy_writes_the_same_text_and_draws_its_step(packs):
    found = b.bench(
        *map(Path, packs),
        policies=b.POLICIES,
        slots=[5],
        draft_tokens=[0, 2],
        prompts=["the quick brown fox"],
        max_tokens=12,
        repeats=2,
        timelines=True,
        device="cpu",
    )
    assert [row.error for row in found.rows] == [None] * len(found.rows) and not found.left_out
    names = [(row.setting.policy, row.setting.draft_tokens) for row in found.rows]
    assert sorted(names) == sorted(
        (policy, n) for policy in b.POLICIES for n in (0, 2) if n or policy not in b.DRAFTED
    )
    assert {line.label.partition(",")[0] for line in found.timelines} == {*b.POLICIES} - {b.ALL}
    for line in found.timelines:
        kinds = [span.kind for span in line.spans]
        assert kinds.count("draft") == 2 and kinds.count("target") == 1
        assert all(0 <= span.begin <= span.end <= line.milliseconds for span in line.spans)
    json.dumps(found.to_dict(), allow_nan=False)


def test_forced_acceptance_is_the_same_for_every_policy_and_texts_are_not_compared(packs):
    found = b.bench(
        *map(Path, packs),
        policies=["on-demand", "sp-moe", "ours"],
        slots=[5],
        draft_tokens=[3],
        prompts=["the quick brown fox", "it was said"],
        max_tokens=24,
        repeats=2,
        acceptance=0.5,
        device="cpu",
    )
    assert [row.error for row in found.rows] == [None] * 4 and found.acceptance == 0.5
    counted = {
        (row.stats.counters.drafted, row.stats.counters.accepted)
        for row in found.rows
        if row.setting.draft_tokens
    }
    assert len(counted) == 1
    drafted, accepted = counted.pop()
    assert 0 < accepted < drafted


def test_a_slower_bus_is_slower_and_driven_by_the_host(packs):
    given = {"policies": ["on-demand"], "slots": [4], "prompts": ["the quick brown fox"]}
    given |= {"max_tokens": 4, "repeats": 2, "device": "cpu"}
    path = Path(packs[0])
    slow, legacy = b.bench(path, link=0.005, **given), b.bench(path, copy_path="legacy", **given)
    counters = slow.rows[0].stats.counters
    assert slow.copy_path == "host" and counters.bytes_moved > 0
    assert counters.stall_seconds > 0.9 * counters.bytes_moved / 5e6
    with b.Engine.load(path, packs[1], slots=4, device="cpu") as engine:
        b.prepare(engine, b.Setting("ours", 4, 4), None, link=0.005)
        copy_ms = engine.decoder.drift.profile.expert_copy_ms
        assert copy_ms == pytest.approx(engine.plan.slot_bytes / 5e3)
    texts = [[run.token_ids for run in found.rows[0].runs] for found in (slow, legacy)]
    assert texts[0] == texts[1] and legacy.copy_path == "legacy"
    for wrong, said in (
        ({"link": 0}, "--link 0: a rate in GB/s"),
        ({"link": 9, "copy_path": "legacy"}, "--link 9"),
        ({"copy_path": "usb"}, "--copy-path usb: one of auto, host, legacy"),
        ({"acceptance": 2}, "--acceptance 2: 0 to 1"),
    ):
        with pytest.raises(UsageError, match=f"^{said}"):
            b.bench(path, **given, **wrong)


def test_each_size_of_vram_is_a_row_with_the_slots_it_holds(packs):
    sizes, given = [], {"device": "cpu", "ctx_size": 64}
    for slots in (3, 5):
        with b.Engine.load(packs[0], slots=slots, **given) as engine:
            sizes.append(str(engine.plan.total_bytes))
    given |= {"policies": ["on-demand"], "prompts": ["it was"], "max_tokens": 4, "repeats": 2}
    found = b.bench(Path(packs[0]), vram=sizes, **given)
    rows = {row.asked: row.setting.slots for row in found.rows}
    assert rows == dict(zip(sizes, (3, 5), strict=True))
    assert {row.to_dict()["vram"] for row in found.rows} == set(sizes)


def test_a_pack_without_experts_is_refused(packs):
    with pytest.raises(UsageError, match="^mistral has no experts"):
        b.bench(Path(packs[1]))
