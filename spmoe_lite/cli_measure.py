"""Commands that measure or foresee: `plan`, `profile`, `bench`, `tune`, `replay`."""

from __future__ import annotations

import contextlib
import shlex
import sys
import threading
from collections.abc import Sequence
from os.path import realpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spmoe_lite import terminal
from spmoe_lite.cli_options import (
    NAME,
    PROGRAM,
    DraftTokens,
    Several,
    amount_options,
    command,
    debug_option,
    engine_options,
    json_option,
    machine_options,
    memory_options,
    model_options,
)
from spmoe_lite.cli_shared import (
    choose,
    echo_json,
    json_text,
    load_pair,
    pack_name,
    pair_name,
    read_prompt,
    show_log,
    typed,
)
from spmoe_lite.errors import NotFoundError, SpmoeError, UsageError
from spmoe_lite.progress import digits, size
from spmoe_lite.terminal import note

if TYPE_CHECKING:
    from spmoe_lite.bench import Bench, Row
    from spmoe_lite.cutoff import Profile
    from spmoe_lite.forecast import Forecast
    from spmoe_lite.progress import OnProgress
    from spmoe_lite.synthetic import Pair

DEFAULT_LINK = 50.0  # GB/s: a PCIe 5 bus


@command()
@model_options
@amount_options
@memory_options
@click.option("--link", type=float, metavar="GB/s", help="Rate of missing experts.")
@click.option("--memory", type=float, metavar="GB/s", help="Rate at which a GPU reads its memory.")
@click.option(
    "--disk", type=float, metavar="GB/s", help="Rate of experts that RAM has no room for."
)
@click.option("--acceptance", type=float, metavar="X", help="Share of draft tokens kept, 0 to 1.")
@json_option
@debug_option
def plan(
    pack: str | None, model: str | None, draft: str | None, as_json: bool, **given: Any
) -> None:
    """Show the memory and speed to expect of PACK.

    Only headers are read. The memory is what `run` would use with the same options; what cannot fit is
    refused with the smallest change that would. A draft takes the room of experts: both ways are priced.
    Times come from `profile` if it was run on this machine, else from rates that are listed with their
    source, and from uniform routing, the hard case. On the CPU passes are timed for it, on weights that
    stand in for those of PACK.

    Without a GPU, --vram 24GB plans for a card of that size; --device cpu for this machine.
    """
    from spmoe_lite.forecast import forecast

    show_log()
    target, draft_path = choose(pack, model, draft, offer=False)
    if given["draft_tokens"] is None:
        del given["draft_tokens"]
    found = forecast(target, draft_path, **given)
    if as_json:
        echo_json(found.to_dict())
        return
    note(pair_name(target, draft_path))
    click.echo(terminal.table(_plan_rows(found), right=[1, 2]))
    if verdict := found.verdict():
        terminal.say(verdict)
    for figure in found.figures:
        note(str(figure))
    for remark in found.notes:
        note(remark)


def _plan_rows(found: Forecast) -> list[list[str]]:
    """Bytes and milliseconds, a column with the draft and one without."""
    ways = [(found.plan, found.speed)]
    heads = [f"ON {found.plan.device.upper()}", ""]
    if found.plain_plan is not None:
        ways.append((found.plain_plan, found.plain_speed))
        heads = [heads[0], "WITH DRAFT", "WITHOUT"]
    plans = [plan for plan, _ in ways]
    parts: list[tuple[str, list[int]]] = [
        ("weights", [p.target_bytes for p in plans]),
        ("draft", [p.draft_bytes for p in plans]),
        (f"KV cache, {found.plan.context} tokens", [p.kv_bytes for p in plans]),
        ("workspace", [p.workspace_bytes for p in plans]),
        ("kernels, captured steps", [p.reserve_bytes for p in plans]),
        ("expert slots", [p.slots * p.slot_bytes for p in plans]),
        ("landing slots, for prompts", [p.landing_slots * p.slot_bytes for p in plans]),
    ]
    rows = [heads]
    for name, counts in parts:
        if any(counts):
            rows.append([name, *(size(count) if count else "-" for count in counts)])
    rows.append(["in all", *(size(p.total_bytes) for p in plans)])
    rows.append(["may be used", *(size(p.budget) for p in plans)])
    if found.plan.expert_count:
        rows.append(["experts in slots", *(f"{p.slots} of {p.expert_count}" for p in plans)])
    if any(p.has_tier for p in plans):
        rows.append(["experts in slots and RAM", *(str(p.held or "all") for p in plans)])
    speeds = [speed for _, speed in ways if speed is not None]
    if any(s.copies for s in speeds):
        rows.append(
            ["missing experts a step", *(digits(s.copies) if s.copies else "-" for s in speeds)]
        )
    if any(s.disk_copies for s in speeds):
        reads = (
            f"{digits(s.disk_copies)} ({s.disk_share:.0%})" if s.disk_copies else "-"
            for s in speeds
        )
        rows.append(["of them read from disk", *reads])
    times: list[tuple[str, list[float]]] = [
        ("ms drafting", [s.drafting_ms for s in speeds]),
        ("ms computing", [s.pass_ms for s in speeds]),
        ("ms for missing experts", [s.copy_ms - s.hidden_ms for s in speeds]),
    ]
    for name, values in times:
        if any(values):
            rows.append([name, *(digits(ms) if ms else "-" for ms in values)])
    if len(speeds) > 1:
        rows.append(["tokens a step", *(digits(s.tokens) for s in speeds)])
    if speeds:
        rows.append(["ms a token", *(digits(s.token_ms) for s in speeds)])
    return rows


@command()
@model_options
@json_option
@engine_options
@debug_option
def profile(
    pack: str | None, model: str | None, draft: str | None, as_json: bool, **given: Any
) -> None:
    """Time the link, the disk, the layers and the draft on this machine.

    The result is kept: it sets how deep drafting prefetches, and `plan` goes by it. Acceptance is counted
    over three short answers.
    """
    from spmoe_lite.profile import keep, measure

    show_log()
    target, draft_path = choose(pack, model, draft, offer=False)
    with load_pair(target, draft_path, given) as engine:
        with terminal.interruptible() as cancel, terminal.ProgressDisplay() as progress:
            measured = measure(engine, cancel, progress)
        if as_json:  # before it is kept, which may fail
            echo_json(measured.to_dict())
        else:
            rows = _profile_rows(measured, engine.plan.slot_bytes)
            click.echo(terminal.table(rows, right=[1]))
        kept, found = keep(engine, measured).to_dict(), measured.to_dict()
    if earlier := [name for name, value in kept.items() if value != found[name]]:
        note(f"not measured this time, as kept before: {', '.join(earlier)}")
    note(f"kept in {engine.profile_path}")


def _profile_rows(measured: Profile, expert_bytes: int) -> list[list[str]]:
    """What was measured, in plain words."""
    expert = f"GB/s, an expert of {size(expert_bytes)} in {digits(measured.expert_copy_ms)} ms"
    copied = "GB/s" if measured.read_gbps is not None else expert
    rows = [["experts copied to slots", f"{measured.copy_gbps:.1f}", copied]]
    if measured.read_gbps is not None:
        rows.append(["experts read by the GPU", f"{measured.read_gbps:.1f}", expert])
    if measured.disk_gbps is not None:
        rows.append(["experts read from disk", f"{measured.disk_gbps:.1f}", "GB/s"])
    rows.append(["a layer, one token", f"{measured.plain_layer_ms:.3f}", "ms"])
    if measured.verify_rows is not None and measured.verify_rows > 1:
        verify = f"a layer, {measured.verify_rows} tokens at once"
        rows.append([verify, f"{measured.target_layer_ms:.3f}", "ms"])
    if measured.draft_token_ms:
        rows.append(["a draft token", f"{measured.draft_token_ms:.3f}", "ms"])
    if measured.acceptance is not None:
        rows.append(["draft tokens accepted", f"{measured.acceptance:.0%}", ""])
    return rows


@command(name="bench")
@model_options
@click.option(
    "--policy",
    type=Several(click.STRING),
    multiple=True,
    allow_from_autoenv=False,  # elsewhere SPMOE_POLICY is one of two
    metavar="NAME,...",
    help="Policies to measure, or all; on-demand,global-lru,ours,all-resident if not given.",
)
@click.option(
    "--slots",
    type=Several(click.IntRange(1)),
    metavar="N,N,...",
    default="",
    help="Numbers of experts kept on the device; as many as --vram holds if not given.",
)
@click.option(
    "--draft-tokens",
    type=Several(DraftTokens()),
    metavar="N,N,...",
    default="",
    help="Tokens drafted per step; 0,4 if not given.",
)
@click.option(
    "--prompts",
    metavar="FILE",
    help='One prompt a line, or JSON lines with "prompt"; - is stdin. Else six built-in ones.',
)
@click.option(
    "--max-tokens",
    type=click.IntRange(2),
    default=64,
    show_default=True,
    metavar="N",
    help="Longest answer.",
)
@click.option(
    "--repeats",
    type=click.IntRange(2),
    default=3,
    show_default=True,
    metavar="N",
    help="Rounds over all prompts; the first is not counted.",
)
@click.option(
    "--synthetic",
    metavar="NAME",
    help="In place of packs a pair of random weights: mixtral-8x7b, tiny. No download.",
)
@click.option(
    "--experts",
    type=click.Choice(["fp32", "bf16", "int8", "int4"]),
    help="Precision of the synthetic pair; int4 if not given.",
)
@click.option(
    "--layers", type=click.IntRange(1), metavar="N", help="Layers of the synthetic pair; else all."
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where the synthetic pair lies until the end; the user's cache if not given.",
)
@click.option(
    "--acceptance",
    type=click.FloatRange(0, 1),
    metavar="A",
    help="Keep a draft token with this probability, whatever the target says; --synthetic only.",
)
@click.option(
    "--copy-path",
    type=click.Choice(["auto", "host", "legacy"]),
    default="auto",
    show_default=True,
    help="host: the host drives every step; legacy: pageable copies, a synchronisation with each, too.",
)
@click.option(
    "--link",
    type=click.FloatRange(0, min_open=True),
    metavar="GB/S",
    help="Pace copies as over a slower bus; the host drives every step.",
)
@click.option(
    "--svg",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw a picture: TPOT by policy, over slots, and one step of each policy.",
)
@click.option(
    "--json",
    type=click.Path(path_type=Path),
    allow_from_autoenv=False,  # elsewhere SPMOE_JSON is a switch
    metavar="FILE",
    help="Write every run, the machine and the command to FILE.",
)
@machine_options
@debug_option
def bench_packs(
    pack: str | None,
    model: str | None,
    draft: str | None,
    policy: tuple[list[str], ...],
    prompts: str | None,
    json: Path | None,
    svg: Path | None,
    synthetic: str | None,
    experts: str | None,
    layers: int | None,
    folder: Path | None,
    threads: int | None,
    **given: Any,
) -> int:
    """Measure PACK, perhaps with a draft, on this machine.

    Policies: on-demand, an LRU in each layer and nothing fetched ahead; global-lru, one LRU; ours, with
    what the draft's states point at fetched ahead; all-resident, every expert in a slot, where they fit.
    And other systems' on the same kernels and copies: next-layer (AdapMoE), trace-match (MoE-Infinity),
    static (Fiddler, llama.cpp; nothing is computed on the CPU), sp-moe (as published).
    Each row is a fresh engine, its first round not counted; every answer is greedy. All rows must write
    the text of the first one, on-demand without drafting: one that does not is an error. STEPS says
    whether they were captured in CUDA graphs or driven by the host; other systems' policies need the host.

    With --synthetic NAME no pack is needed: random weights at the shapes of NAME are written, measured and
    deleted. Near uniform routing makes them the hard case for any cache.

    --slots and --draft-tokens take several numbers, and --vram several sizes: a row for each.
    TPOT is the time of a token after the first text, drafting included: median, least and most of all
    answers. Hits are by unique expert and by access, as in `replay`. STALL is the share of that time in
    which the target waited for experts.
    """
    from spmoe_lite.bench import (
        POLICIES,
        USUAL,
        bench,
        check_fit,
        check_how,
        machine,
        plan_rows,
        summary,
    )
    from spmoe_lite.chart import draw
    from spmoe_lite.files import write_whole
    from spmoe_lite.prompts import PROMPTS, parse_prompts

    texts = parse_prompts(read_prompt(None, prompts), prompts) if prompts else PROMPTS
    for flag, file in {"--json": json, "--svg": svg}.items():
        if file is not None and not file.parent.is_dir():
            raise NotFoundError(f"{flag} {file}: there is no folder {file.parent}")
        if file is not None and file.is_dir():
            raise UsageError(f"{flag} {file} is a folder: name a file")
    if json is not None and svg is not None and realpath(json) == realpath(svg):
        raise UsageError(f"--json and --svg both name {svg}: give two files")
    policies: Sequence[str] = [name for names in policy for name in names] or USUAL
    if "all" in policies:
        policies = POLICIES
    show_log()
    given["vram"] = [one.strip() for one in given["vram"].split(",")]
    pair = None
    if synthetic is None:
        given["acceptance"] = typed("acceptance", given["acceptance"])  # else `plan` is meant
        only = {"experts": experts, "layers": layers, "folder": folder}
        for name, value in (only | {"acceptance": given["acceptance"]}).items():
            if typed(name, value) is not None:
                raise UsageError(f"--{name} {value}: with --synthetic only")
        target, draft_path = choose(pack, model, draft, offer=False)
        note(pair_name(target, draft_path))
    else:
        from spmoe_lite.synthetic import Pair

        if named := pack or typed("model", model) or typed("draft", draft):
            raise UsageError(f"--synthetic {synthetic} brings its own packs: leave out {named}")
        pair = Pair.of(synthetic, layers=layers, experts=experts or "int4")
        count = pair.target.num_hidden_layers * pair.target.num_local_experts
        amounts = given["slots"], given["draft_tokens"]
        rows = plan_rows(policies, *amounts, count, True, given["vram"])  # before it is written
        check_how(given["copy_path"], given["link"], given["acceptance"])
        pair.check_prompts(texts, given["ctx_size"])
        check_fit(pair, rows[0], **{key: given[key] for key in ("device", "ctx_size", "kv_type")})
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    with (
        terminal.interruptible(
            terminated=True
        ) as cancel,  # minutes of figures, gigabytes to delete
        terminal.ProgressDisplay() as progress,
        contextlib.ExitStack() as stack,
    ):
        if pair is not None:
            target, draft_path = _write_pair(stack, pair, folder, given, cancel, progress)

        def tell(row: Row) -> None:
            progress.close()
            note(f"{row.setting}: " + (f"{row.tpot_ms[0]:.1f} ms a token" if row.tpot_ms else "-"))

        result = bench(
            target,
            draft_path,
            policies=policies,
            prompts=texts,
            timelines=svg is not None,
            cancel=cancel,
            on_progress=progress,
            on_row=tell,
            **given,
        )
    command, where = f"{PROGRAM} {shlex.join(sys.argv[1:])}", machine()
    made: list[tuple[Path, str]] = []
    if json is not None and result.rows:
        how: dict[str, Any] = {"command": command, "machine": where}
        how |= {"target": pack_name(target), "draft": pack_name(draft_path) if draft_path else None}
        how |= {"prompts": list(texts), "max_tokens": given["max_tokens"]}
        made.append((json, json_text({**how, **result.to_dict()}) + "\n"))
    if svg is not None and result.rows:
        title = f"{pair_name(target, draft_path)}, on {where['gpu'] or where['cpu']}"
        made.append((svg, draw(result, title, [command, *_conditions(result)])))
    failed: list[SpmoeError] = []  # what was measured is shown whatever becomes of the files
    for file, text in made:
        try:
            write_whole(file, text)
        except SpmoeError as error:
            failed.append(error)
    if result.rows:
        click.echo(_bench_table(result.rows))
        click.echo(summary(result.rows))
    for condition in _conditions(result):
        note(condition)
    for name, reason in result.left_out.items():
        note(f"without {name}: {reason}")
    notices = [(row.setting.policy, notice) for row in result.rows for notice in row.notices]
    for name, notice in dict.fromkeys(notices):
        note(f"{name}: {notice}")
    for row in result.rows:
        if row.error:
            terminal.remark(f"{NAME}: {row.setting}: {row.error}")
    if failed:
        for other in failed[1:]:
            terminal.remark(f"{NAME}: {other}")
        raise failed[0]
    if result.interrupted:
        note(f"interrupted; rows measured: {len(result.rows)}")
        return 130
    return 1 if any(row.error for row in result.rows) else 0


def _write_pair(
    stack: contextlib.ExitStack,
    pair: Pair,
    folder: Path | None,
    given: dict[str, Any],
    cancel: threading.Event,
    progress: OnProgress,
) -> tuple[Path, Path]:
    """A synthetic pair until the stack ends. Its equal experts share RAM, so that all can be page-locked."""
    import torch

    from spmoe_lite.device import available_bytes
    from spmoe_lite.synthetic import cache_folder, temporary_pair

    folder = folder or cache_folder()
    note(f"{pair} to {folder}, deleted at the end")
    if given["pin"] == "auto" and 2 * pair.disk_bytes < available_bytes(torch.device("cpu")):
        given["pin"] = "all"
    packs = temporary_pair(pair, folder, cancel=cancel, on_progress=progress)
    return stack.enter_context(packs)


def _conditions(result: Bench) -> list[str]:
    """What has to be said wherever the figures are shown."""
    said = []
    if result.acceptance is not None:
        said.append(f"acceptance forced to {result.acceptance:g}: texts are nobody's, not compared")
    if result.link is not None:
        said.append(f"copies paced to {result.link:g} GB/s; every step driven by the host")
    elif result.copy_path == "host":
        said.append("every step driven by the host")
    elif result.copy_path == "legacy":
        said.append(
            "legacy copies: pageable memory, a synchronisation with each; driven by the host"
        )
    return said


@command()
@click.argument("pack", required=False)
@click.option(
    "--device", default="auto", metavar="DEVICE", help="Which GPU to tune for: cuda, cuda:N."
)
@json_option
@debug_option
def tune(pack: str | None, device: str, as_json: bool) -> None:
    """Find faster kernel tiles for this GPU.

    Tiles near the shipped ones are timed at the shapes of PACK, or of the pack used last; it takes
    minutes. Those that are at least 3 % faster and change no bit of a result are kept, and every later
    start uses them. Nothing is tuned at any other time.
    """
    from dataclasses import asdict

    from spmoe_lite.tune import tune as library_tune

    show_log()
    target, _ = choose(pack, None, None, offer=False)
    with terminal.interruptible() as cancel, terminal.ProgressDisplay() as progress:
        tried, path = library_tune(target, device=device, cancel=cancel, on_progress=progress)
    if as_json:
        echo_json({"file": str(path), "tried": [asdict(one) for one in tried]})
    else:
        rows = [["PRODUCT", "ROWS", "N", "K", "WARPS", "STAGES", "US", "RESULT"]]
        for one in tried:
            t, product = one.tile, f"{one.product.kind} {one.product.weights}"
            sizes = [str(v) for v in (t.t, t.n, t.k, t.warps, t.stages)]
            rows.append([product, *sizes, "-" if one.ms is None else f"{one.ms * 1e3:.1f}"])
            rows[-1].append(terminal.printable(one.verdict))
        click.echo(terminal.table(rows, right=[1, 2, 3, 4, 5, 6]))
    kept = sum(one.verdict == "kept" for one in tried)
    note(f"{kept} of {sum(one.verdict != 'shipped' for one in tried)} tiles kept in {path}")


@command(name="replay")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--slots",
    type=Several(click.IntRange(1)),
    metavar="N,N,...",
    default="",
    help="Numbers of slots to try; the recorded one if not given.",
)
@click.option(
    "--policy",
    type=Several(click.STRING),
    allow_from_autoenv=False,  # elsewhere SPMOE_POLICY is one of two
    metavar="NAME,...",
    default="",
    help="Policies to try; all if not given.",
)
@click.option(
    "--warm-up",
    type=float,
    default=0.5,
    show_default=True,
    metavar="X",
    help="Share of the passes that fills the slots and teaches `static`, and is not counted.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Another trace to teach `static`.",
)
@click.option(
    "--link",
    type=float,
    metavar="GB/s",
    help="Rate of copies; as measured by `profile` before the recording, else 50.",
)
@json_option
@debug_option
def replay_trace(
    file: Path,
    slots: list[int],
    policy: list[str],
    warm_up: float,
    calibration: Path | None,
    link: float | None,
    as_json: bool,
) -> None:
    """Try cache policies on a recording.

    FILE was written by `run` or `chat` with --trace. Nothing is loaded or computed but who is in a slot
    when. Hits are by unique expert and by access, of accepted tokens, as after an answer. Misses count
    rejected tokens too, copies also what was fetched ahead. Seconds are the bus alone: every copy at
    the rate of --link, none hidden behind computing.

    Policies: layer-lru and global-lru, as --policy of `run`; prefetch, layer-lru with the draft's
    predictions; textbook-lru, layer-lfru, global-lfru, static, stream; and layer-belady, global-belady,
    belady-bypass, which know the future and bound the others. docs/cache.md says what each does.
    """
    from dataclasses import asdict

    from spmoe_lite.replay import compare
    from spmoe_lite.trace import check_link, read_trace

    show_log()
    trace = read_trace(file)
    rate = (trace.header.link or DEFAULT_LINK) if link is None else link
    check_link("--link", rate)
    with terminal.interruptible() as cancel, terminal.ProgressDisplay() as progress:
        result = compare(
            trace,
            slots=slots,
            policies=policy,
            warm_up=warm_up,
            calibration=read_trace(calibration) if calibration else None,
            cancel=cancel,
            on_progress=progress,
        )
    if as_json:
        values = asdict(result) | {"trace": asdict(trace.header), "link": rate}
        echo_json(values | {"scores": [score.to_dict(rate) for score in result.scores]})
        return
    rows = [["POLICY", "SLOTS", "HITS", "BY ACCESS", "MISSES/TOKEN", "COPIED/TOKEN", "S/TOKEN"]]
    for one in result.scores:
        hits = ["-" if r is None else f"{r:.1%}" for r in (one.hit_rate_unique, one.hit_rate)]
        rows.append([one.policy, str(one.slots), *hits, f"{one.misses_per_token:.2f}"])
        rows[-1] += [size(one.bytes_per_token), digits(one.seconds_per_token(rate))]
    click.echo(terminal.table(rows, right=[1, 2, 3, 4, 5, 6]))
    note(
        f"{terminal.printable(trace.header.model)}: {result.passes} passes, {result.tokens} tokens, "
        f"in a pass {result.union:.1f} of {trace.header.experts} experts a layer; {rate:.1f} GB/s"
    )
    for name, reason in result.left_out.items():
        note(f"without {name}: {reason}")


def _bench_table(rows: Sequence[Row]) -> str:
    lines = [
        ["POLICY", "SLOTS", "DRAFTS", "TPOT MS", "LEAST", "MOST", "TOK/S", "FIRST S", "ACCEPTED"]
        + ["HITS", "BY ACCESS", "MB/TOKEN", "STALL", "USEFUL", "LATE", "WASTED", "STEPS"]
    ]
    for row in rows:
        stats, c, found = row.stats, row.stats.counters, row.to_dict()
        shares = [stats.acceptance, stats.hit_rate_unique, stats.hit_rate]
        accepted, *hits = ["-" if share is None else f"{share:.1%}" for share in shares]
        times = ["-" if time is None else f"{time:.1f}" for time in row.tpot_ms or [None] * 3]
        rate, moved, stall = stats.tokens_per_second, found["mb_per_token"], found["stall_share"]
        lines.append([row.setting.policy, str(row.setting.slots), str(row.setting.draft_tokens)])
        lines[-1] += [*times, "-" if rate is None else f"{rate:.1f}"]
        lines[-1] += [f"{stats.time_to_first_token:.2f}", accepted, *hits]
        lines[-1] += [
            "-" if moved is None else f"{moved:.1f}",
            "-" if stall is None else f"{stall:.0%}",
        ]
        lines[-1] += [str(n) for n in (c.prefetch_useful, c.prefetch_late, c.prefetch_wasted)]
        lines[-1].append(row.steps.removeprefix("driven by the "))
    return terminal.table(lines, right=range(1, len(lines[0])))
