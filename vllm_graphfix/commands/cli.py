"""The command line: status, explain, verify, compare, hunt, fleet, report, doctor."""

from __future__ import annotations

import gc
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_graphfix.commands.arguments import (
    DeviceName,
    FolderOption,
    JsonOption,
    VersionOption,
    VllmOption,
    complete_fix,
    find_fix,
    open_vllm,
)
from vllm_graphfix.commands.output import (
    EXIT_CANNOT_TELL,
    EXIT_HIT,
    EXIT_INCOMPLETE,
    EXIT_INTERRUPTED,
    EXIT_NOT_PROVEN,
    console,
    end_unprinted,
    prepare_streams,
    stop,
)
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.fixes import flags as flags_of_fixes
from vllm_graphfix.manifest import ManifestError
from vllm_graphfix.source.files import SourceError, open_source
from vllm_graphfix.text import printable

if TYPE_CHECKING:
    from vllm_graphfix.commands.status import Status
    from vllm_graphfix.source.files import Source

app = typer.Typer(
    name="vllm-graphfix",
    help="Corrects CUDA-graph defects of stock vLLM: what this vLLM needs, what is done about it, "
    "and proof that it works.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _main(version: VersionOption = False) -> None: ...


@app.command()
def status(
    vllm: VllmOption = None,
    as_json: JsonOption = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Exit with code 3 if a fix is needed and would not be applied (those that are observed by default "
            "do not count), or if a variable has an invalid value.",
        ),
    ] = False,
    flags: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="FLAGS",
            help="Your `vllm serve`, in quotes, also as `ps` prints it: is it hit, and what helps? "
            "Environment variables go in front, as NAME=value.",
        ),
    ] = None,
    running: Annotated[
        bool,
        typer.Option(
            "--running", help="The same for each `vllm serve` that runs here: flags and environment of /proc."
        ),
    ] = False,
    exit_hit: Annotated[
        bool,
        typer.Option("--exit-hit", help="With --for or --running: exit with 1 if it is hit, 4 if that cannot be told."),
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With --for or --running: the GPU that serves the model; default: this machine's."
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also the defects that this vLLM does not have, or that are not yours.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also what each verdict rests on, with its place in the source.")
    ] = False,
) -> None:
    """Which known defects this vLLM has, and what would be done about each in this environment.

    vLLM is not imported.
    """
    from vllm_graphfix.commands.status_table import show
    from vllm_graphfix.deployment import FlagsError
    from vllm_graphfix.deployment.hardware import capability
    from vllm_graphfix.deployment.secrets import without_secrets

    if flags is not None and running:
        stop("--for and --running exclude each other: name the flags, or have them read")
    for option in ("--gpu NAME",) * (gpu is not None) + ("--exit-hit",) * exit_hit:
        if flags is None and not running:
            stop(
                f"{option.split()[0]} only goes with --for or --running: vllm-graphfix status --for 'MODEL …' {option}"
            )
    if gpu is not None and capability(gpu) is None:
        stop(f"no GPU that this plugin knows is called {gpu!r}; say H100, or its compute capability, such as 9.0")
    try:
        source = open_vllm(vllm)
        all_judged, unread = _judged(source, flags, gpu, running=running, elsewhere=vllm is not None)
    except (SourceError, ManifestError, FlagsError) as error:
        theirs = "; --running needs the Python that serves: `head -1 $(which vllm)`" * (running and vllm is None)
        stop(without_secrets(str(error)) + theirs * isinstance(error, SourceError))
    if as_json:
        reports = [judged.as_json() | ({"process": process} if process else {}) for process, judged in all_judged]
        typer.echo(json.dumps({"schema": 1, "servers": reports} if running else reports[0], indent=2))
    for number, (process, judged) in enumerate(() if as_json else all_judged):
        if process:
            typer.echo("\n" * bool(number), nl=False)
            typer.echo(f"{process['pid']}: {process['command']}")
        show(judged, console(), everything=everything, verbose=verbose)
    for _, judged in all_judged if check else ():
        if judged.is_incomplete or judged.unknown:
            typer.echo(f"check failed: {judged.why_incomplete}", err=as_json)
            raise typer.Exit(EXIT_INCOMPLETE if judged.is_incomplete else EXIT_CANNOT_TELL)
    if exit_hit and any(judged.hit for _, judged in all_judged):
        raise typer.Exit(EXIT_HIT)
    if exit_hit and (unread or any(judged.undecided for _, judged in all_judged)):
        raise typer.Exit(EXIT_CANNOT_TELL)


def _judged(
    source: Source, flags: str | None, gpu: str | None, *, running: bool, elsewhere: bool
) -> tuple[list[tuple[dict[str, Any], Status]], int]:
    """Judge *source* for *flags*, or for each running server, whose process comes with it.

    The number is that of running servers that could not be judged; a note names each.
    """
    from vllm_graphfix.commands.status import status as judge
    from vllm_graphfix.deployment import FlagsError, read_deployment

    if not running:
        deployment = None if flags is None else read_deployment(flags, source, gpu, flags=flags_of_fixes())
        return [({}, judge(source, deployment=deployment)._replace(elsewhere=elsewhere))], 0
    # Imports the whole of `fleet`, which takes a tenth of the time of the other case.
    from vllm_graphfix.commands.running import servers, why_another_vllm
    from vllm_graphfix.deployment.secrets import without_secrets

    found, notes = servers()
    judged: list[tuple[dict[str, Any], Status]] = []
    for server in found:
        if not elsewhere and (why := why_another_vllm(server.pid, source.folder)):
            notes.append(f"process {server.pid} {why}")
            continue
        try:
            deployment = read_deployment(
                server.line, source, gpu, server.environment, flags=flags_of_fixes(), read=server.read
            )
        except FlagsError as error:
            notes.append(f"process {server.pid}: {error}")
            continue
        process = {"pid": server.pid, "command": printable(server.visible_line)}
        judged.append((process, judge(source, server.environment, deployment)._replace(elsewhere=True)))
    for note in notes:
        typer.echo(f"vllm-graphfix: {printable(without_secrets(note))}", err=True)
    if not judged:
        stop("no `vllm serve` runs here whose flags can be read; give them with --for")
    return judged, len(notes)


@app.command()
def explain(
    fix: Annotated[
        str | None,
        typer.Argument(
            metavar="[FIX]", help="Name of a fix; without it, all fixes are listed.", autocompletion=complete_fix
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Symptom, cause, what the fix does and counts, how to tell whether you are affected, and the workaround."""
    from vllm_graphfix.commands import explain as explaining

    chosen = None if fix is None else find_fix(fix)
    if as_json:
        explained = explaining.all_as_json() if chosen is None else explaining.as_json(chosen)
        typer.echo(json.dumps(explained, indent=2))
    elif chosen is None:
        explaining.show_all(console())
    else:
        explaining.show(chosen, console())


@app.command()
def verify(
    fixes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FIX]…", help="Names of fixes; default: all.", autocompletion=complete_fix),
    ] = None,
    vllm: VllmOption = None,
    device: Annotated[
        DeviceName | None,
        typer.Option(
            help="gpu: real engines with tiny models on this machine's GPU. cpu: vLLM's classes on a CPU double of "
            "CUDA graphs. Default: the GPU if there is one."
        ),
    ] = None,
    as_json: JsonOption = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also what was compared, and the defects that this vLLM does not have.")
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="On a GPU: each engine imports vLLM itself, and is not forked from a process that has."
        ),
    ] = False,
    parallel: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="On a GPU: engines at a time. Default: as many as the machine takes."),
    ] = None,
) -> None:
    """Prove the fixes on this machine: vLLM without and with CUDA graphs, stock and patched. Nothing is downloaded.

    Exit code 0 if every proof holds, 1 if one does not, 2 if nothing can be run (it needs torch), 3 if all that ran
    hold but some could not be run here, 4 if there is code that is not recognised and could not be run.
    """
    from vllm_graphfix.verify import VerifyError
    from vllm_graphfix.verify.report import as_json as report_json
    from vllm_graphfix.verify.report import show
    from vllm_graphfix.verify.run import run

    chosen = list(dict.fromkeys(find_fix(name) for name in fixes or BY_NAME))
    try:
        report = run(
            open_source(vllm),
            chosen,
            device.value if device else None,
            console(stderr=True),
            fresh=fresh,
            parallel=parallel,
        )
    except (SourceError, ManifestError, VerifyError, OSError) as error:  # OSError: a full disk, for example
        stop(str(error))
    except KeyboardInterrupt:
        stop("interrupted; all processes it had started have ended", code=EXIT_INTERRUPTED)
    if as_json:
        typer.echo(json.dumps(report_json(report), indent=2))
    else:
        show(report, console(), verbose=verbose)
    if not report.holds:
        raise typer.Exit(EXIT_NOT_PROVEN)
    if report.undecided:
        raise typer.Exit(EXIT_CANNOT_TELL)
    if not report.complete:
        raise typer.Exit(EXIT_INCOMPLETE)


# No short options here, not even `-h`, which is found among vLLM's arguments: its flags, such as `-dph`, `-O3` or
# `-cc.cudagraph_mode=FULL`, would be parsed as ours.
@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]},
)
def compare(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The model, as for `vllm serve`; put vLLM's flags after it.")
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="One prompt per line; in a .jsonl file: text, token ids, "
            "or objects with `prompt` or `prompt_token_ids`.",
        ),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="How many prompts to make up if --prompts is not given.")
    ] = 16,
    max_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of the longest answer; the others are shorter, down to half of that.")
    ] = 128,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds for each engine, start-up included.")] = 3600.0,
    poison: Annotated[
        bool,
        typer.Option(
            "--poison",
            help="Also: do padded rows, the null block, unused blocks, freed memory reach answers? One more engine.",
        ),
    ] = False,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Also: is each replayed step equal to the same step without graphs? One more engine.",
        ),
    ] = False,
    gap: Annotated[
        bool,
        typer.Option(
            "--gap",
            help="Also: how far are log-probabilities from eager's, and by what: torch.compile, padding, graphs?",
        ),
    ] = False,
    as_twin: Annotated[
        bool,
        typer.Option(
            "--twin",
            help="A small model of the same architecture, with random weights, made from MODEL's config.json alone.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Does this model give the same tokens with CUDA graphs as without? Runs it greedily with your flags.

    One engine runs after the other. The environment decides whether the fixes are on; VLLM_GRAPHFIX=off shows stock.

    Exit code 0 if no answer is corrupt, 1 for corruption, a wrong replay, or poison that was seen, 2 if nothing could
    be compared, 3 if there is no verdict, as without graphs.
    """
    from vllm_graphfix.commands.compare import CompareError
    from vllm_graphfix.commands.compare.prompts import read_prompts
    from vllm_graphfix.commands.compare.report import as_json as report_json
    from vllm_graphfix.commands.compare.report import show
    from vllm_graphfix.commands.compare.run import Options, run

    if "-h" in (model, *context.args):
        typer.echo(context.get_help())
        return
    if model.startswith("-") and not Path(model).exists():  # a flag of vLLM's, not a model
        stop(f"name the model first: vllm-graphfix compare MODEL {model} …")
    try:
        texts = read_prompts(prompts) if prompts is not None else ()
        options = Options(texts, num_prompts, max_tokens, timeout, poison=poison, exact=exact, gap=gap)
        report = run(model, context.args, options, console(stderr=True), as_twin=as_twin)
    except (SourceError, CompareError, OSError) as error:
        stop(str(error))
    except KeyboardInterrupt as interrupt:
        stop(f"interrupted; all processes it had started have ended {interrupt}".rstrip(), code=EXIT_INTERRUPTED)
    if as_json:
        typer.echo(json.dumps(report_json(report), indent=2))
    else:
        show(report, console())
    if report.wrong:
        raise typer.Exit(EXIT_NOT_PROVEN)
    if report.inconclusive is not None:
        raise typer.Exit(EXIT_INCOMPLETE)


@app.command()
def hunt(
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Results, one line of JSON a case; a second call goes on there.")
    ] = Path("graphfix-hunt"),
    cases: Annotated[
        int | None, typer.Option(min=1, help="How many; default: until each pair of values was tried.")
    ] = None,
    shard: Annotated[str, typer.Option(metavar="K/N", help="Every Nth case, from the Kth: one of N machines.")] = "1/1",
    architectures: Annotated[
        str, typer.Option(metavar="NAMES", help="These alone, with commas between, as in config.json.")
    ] = "",
    flags: Annotated[
        str | None,
        typer.Option("--for", metavar="FLAGS", help="Your `vllm serve`, in quotes: that model, then what is near."),
    ] = None,
    leave_out: Annotated[
        str, typer.Option(metavar="VALUES", help="Values that no case has, such as FLASHINFER,turboquant_k8v4.")
    ] = "",
    changed_since: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A wheel file or folder of an earlier vLLM: architectures whose model's file has changed come first.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Another one makes other cases.")] = 0,
    minutes: Annotated[float | None, typer.Option(min=0.1, help="After these no case begins.")] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds for each engine, start-up included.")] = 300.0,
    parallel: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Engines at a time. Default: as many as the machine takes.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Which architectures are wrong with CUDA graphs, under which flags? Small models of all, compared one by one.

    Exit code 0 if all that ran are right, 1 if one is wrong or fails, 2 if nothing could be run, 3 if there is a case
    without a verdict.
    """
    from vllm_graphfix.commands.compare import CompareError
    from vllm_graphfix.commands.hunt.deployed import read
    from vllm_graphfix.commands.hunt.design import NAMES
    from vllm_graphfix.commands.hunt.report import as_json as report_json
    from vllm_graphfix.commands.hunt.report import show
    from vllm_graphfix.commands.hunt.run import FAILS, UNCLEAR, WRONG, Hunt, run

    part = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", shard)
    if part is None or int(part[1]) > int(part[2]):
        stop(f"--shard {shard}: give the number of this shard and of all, such as 3/8")
    without = [name for name in leave_out.split(",") if name]
    if unknown := set(without) - set(NAMES):
        stop(f"--leave-out {', '.join(sorted(unknown))}: there are {', '.join(NAMES)}")
    chosen = [name for name in architectures.split(",") if name]
    if flags is not None and (chosen or changed_since):
        stop("--for names one model: leave out --architectures and --changed-since")
    place = (int(part[1]), int(part[2]))
    try:
        earlier = open_source(changed_since) if changed_since is not None else None
        source = open_source(None)
        yours = read(flags, source) if flags is not None else None
        options = Hunt(out, cases, place, chosen, without, seed, minutes, timeout, parallel, yours, earlier)
        hunted = run(source, options, console(stderr=True))
    except (SourceError, CompareError, OSError) as error:
        stop(str(error))
    except KeyboardInterrupt:
        stop(f"interrupted; results so far: {out}; the same command goes on", code=EXIT_INTERRUPTED)
    if as_json:
        typer.echo(json.dumps(report_json(hunted), indent=2))
    else:
        show(hunted, console())
    verdicts = {row["verdict"] for row in hunted.rows}
    if verdicts & {WRONG, FAILS}:
        raise typer.Exit(EXIT_NOT_PROVEN)
    if UNCLEAR in verdicts:
        raise typer.Exit(EXIT_INCOMPLETE)


@app.command()
def fleet(
    engine_or_seconds: Annotated[
        str | None,
        typer.Argument(
            metavar="[ENGINE|SECONDS]",
            help="The beginning of an engine's name: its details. With --watch: seconds between refreshes; default: 2.",
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="The details of every engine.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    folder: FolderOption = None,
    as_json: JsonOption = False,
    prometheus: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Ask this Prometheus, Thanos or Mimir for the series of all engines; read no records."
        ),
    ] = None,
    selector: Annotated[
        str | None,
        typer.Option(metavar="MATCHERS", help="""With --prometheus: only these targets, as 'namespace="llm"'."""),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="PATH", help="With --prometheus: a file with a bearer token.")
    ] = None,
    ca_file: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="With --prometheus: certificates to trust, instead of the system's."),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --prometheus: the tenant, for a Mimir that has several.")
    ] = None,
) -> None:
    """What the processes of the running engines report, and whether all ranks agree.

    Exit code 0 if all running engines are in order, 1 if something is wrong, 3 if no engine runs, 4 if one is still
    starting.
    """
    from vllm_graphfix.commands import fleet as fleets

    seconds = _number(engine_or_seconds) if watch and engine_or_seconds is not None else None
    if watch and (everything or (engine_or_seconds is not None and seconds is None)):
        stop("--watch shows all engines in short, and takes seconds: vllm-graphfix fleet --watch SECONDS")
    if as_json and (everything or engine_or_seconds is not None):
        stop("--json has all engines with all details: vllm-graphfix fleet --json")
    if watch and as_json:
        stop("--watch and --json do not go together: call `vllm-graphfix fleet --json` as often as you need it")
    if prometheus is None and (selector, token_file, ca_file, tenant) != (None,) * 4:
        stop("--selector, --token-file, --ca-file and --tenant go with --prometheus")
    if prometheus is not None and folder is not None:
        stop("--dir is for records and --prometheus for series: give one of them")

    def look() -> fleets.Fleet:
        if prometheus is None:
            return fleets.look(folder)
        return fleets.look_at(fleets.Source(prometheus, selector or "", token_file, ca_file, tenant))

    try:
        if watch:
            fleets.watch(look, 2.0 if seconds is None else seconds, console())
            return
        engines = look()
    except fleets.FleetError as error:
        stop(str(error))
    except KeyboardInterrupt:
        stop("interrupted", code=EXIT_INTERRUPTED)
    if as_json:
        typer.echo(json.dumps(fleets.as_json(engines), indent=2))
    else:
        try:
            console().print(fleets.render(engines, everything=everything, engine=engine_or_seconds))
        except fleets.FleetError as error:
            stop(str(error))
    if engines.exit_code:
        raise typer.Exit(engines.exit_code)


@app.command()
def report(
    folder: FolderOption = None,
    compared: Annotated[
        Path | None,
        typer.Option(
            "--compared",
            metavar="FILE",
            help="What `compare --json` has printed, with --poison or without, in place of status records.",
        ),
    ] = None,
    defect: Annotated[
        str | None,
        typer.Option(
            "--defect",
            metavar="FIX",
            help="A known defect, in place of status records: an issue for vLLM, and a test that fails on stock.",
            autocompletion=complete_fix,
        ),
    ] = None,
    vllm: VllmOption = None,
) -> None:
    """Bug reports for vLLM, in Markdown, of what the shadow check, marks in the KV cache and addresses have found.

    With --compared, of what poison and a comparison of answers have; with --defect, of a defect that the vLLM of --vllm
    has. Exit code 0 if there is something to report, 3 if not, 4 if that cannot be told.
    """
    if defect is not None:
        if folder is not None or compared is not None:
            stop("--defect is about a vLLM, --dir about records, --compared about a comparison: name one of them")
        _report_defect(defect, vllm)
        return
    if vllm is not None:
        stop("--vllm only goes with --defect: vllm-graphfix report --defect FIX --vllm PATH")
    if compared is not None:
        _report_comparison(compared, folder)
        return
    from vllm_graphfix.commands import fleet as fleets
    from vllm_graphfix.commands.upstream_report import markdown

    try:
        text = markdown(fleets.look(folder))
    except fleets.FleetError as error:
        stop(str(error))
    except KeyboardInterrupt:
        stop("interrupted", code=EXIT_INTERRUPTED)
    if text is None:
        typer.echo(
            "vllm-graphfix: no status record mentions a wrong graph, a cache block that changed or a tensor that moved",
            err=True,
        )
        raise typer.Exit(EXIT_INCOMPLETE)
    typer.echo(text, nl=False)


def _report_comparison(compared: Path, folder: Path | None) -> None:
    from vllm_graphfix.commands.compare import CompareError
    from vllm_graphfix.commands.compare.upstream_report import of_comparison

    if folder is not None:
        stop("--dir is for status records and --compared for a comparison: name one of them")
    try:
        text = of_comparison(compared)
    except CompareError as error:
        stop(str(error))
    if text is None:
        typer.echo(f"vllm-graphfix: in {compared} no answer and no replay is wrong, and poison was not seen", err=True)
        raise typer.Exit(EXIT_INCOMPLETE)
    typer.echo(text, nl=False)


def _report_defect(name: str, vllm: Path | None) -> None:
    from vllm_graphfix import manifest
    from vllm_graphfix.commands.defect_report import markdown
    from vllm_graphfix.fix import Verdict

    fix = find_fix(name)
    try:
        source = open_source(vllm)
        diagnosis = manifest.diagnose(fix, source)
    except (SourceError, ManifestError) as error:
        stop(str(error))
    if diagnosis.verdict is Verdict.AFFECTED:
        typer.echo(markdown(fix, source.version, diagnosis), nl=False)
        return
    typer.echo(f"vllm-graphfix: vLLM {source.version}: {diagnosis.verdict.value}: {diagnosis.reason}", err=True)
    raise typer.Exit(EXIT_CANNOT_TELL if diagnosis.verdict is Verdict.UNRECOGNISED else EXIT_INCOMPLETE)


@app.command()
def doctor(vllm: VllmOption = None, as_json: JsonOption = False) -> None:
    """Everything a bug report needs, ready to paste: versions, GPU, platform, settings, status, fleet, errors.

    Secrets are masked. Also says what could not be found out. Exit code 0.
    """
    from vllm_graphfix.commands import doctor as doctors

    try:
        examined = doctors.examine(vllm)
    except KeyboardInterrupt:
        stop("interrupted", code=EXIT_INTERRUPTED)
    typer.echo(json.dumps(examined.as_json(), indent=2) if as_json else doctors.markdown(examined), nl=as_json)


def main() -> None:
    """Run `vllm-graphfix`, the console script."""
    gc.set_threshold(50_000)  # looking through what imports make, all of which stays, takes 5 % of a command's time
    prepare_streams()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:  # with a file name, it is no error of writing to a stream
            if "--install-completion" not in sys.argv:
                raise
            end_unprinted(f"{error.filename}: {error.strerror}")
        end_unprinted(None if isinstance(error, BrokenPipeError) else str(error.strerror))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
