"""The report of a preflight on a terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

from grpo.extras.preflight.verdict import percent
from grpo.utils.spoken import spoken
from rewards.text import printable

COLUMNS = ("size", "fraction", "95 %", "groups", "effective", "s/step", "per s")
"""Headings of the table of group sizes."""
NEAR = 3.2
"""Factor within which suggested rates were of the best ones of sweeps: benchmarks/preflight.json."""
OFTEN = 0.1
"""Fraction of truncated completions above which they speak against a run, as in the page of a run."""
SHORT = 60
"""Characters of a prompt in the list of problems."""


def between(estimate: dict[str, Any], form: Any = percent) -> str:
    """Return an estimate and its interval."""
    low, high = ("?" if end is None else form(end) for end in estimate["interval"])
    return f"{form(estimate['value'])} ({low} to {high})"


def number(value: float) -> str:
    """Return a number with three significant digits."""
    return f"{value:.3g}"


def show(report: dict[str, Any], console: Console) -> None:
    """Print a report; its last lines are the verdict, and the command of a run that learns if there is one."""

    def show_lines(lines: list[tuple[str, str]]) -> None:
        for name, text in lines:
            console.print(f"{name:<12} {printable(text)}", soft_wrap=True)

    show_lines(before_groups(report))
    console.print(groups(report))
    show_lines(after_groups(report))
    style = "bold green" if report["learns"] else "bold red"
    console.print(report["verdict"], style=style, soft_wrap=True)
    for suggestion in report["suggestions"]:
        words = " ".join(suggestion["overrides"])
        console.print(f"  {words}\n      {effect(suggestion)}", soft_wrap=True)
    if report["learns"] or report["suggestions"]:
        console.print(report["command"], soft_wrap=True)


def before_groups(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines before the table of groups, each with its name."""
    count = f"{report['problems']} problems, {report['samples']} completions each"
    sampled = ("sampled", f"{count}, by {report['engine']} from {report['model']}; intervals are 95 %")
    return [sampled, *of_problems(report), *of_rewards(report)]


def after_groups(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines after it."""
    return [*of_completions(report), *of_rate(report["learning_rate"]), *of_time(report["time"])]


def lines_of(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return all lines of a report, each with its name."""
    return [*before_groups(report), *after_groups(report)]


def against(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines that speak against the run as it is."""
    counts, repeated, lengths = report["counts"]["train"], report["duplicates"], report["lengths"]
    names = {"warning", "contradict", "thinking"}
    names |= {"disagree"} if report["contradictions"] else set()
    names |= {"answers"} if counts["unread_answer"] + counts["not_a_number"] else set()
    names |= {"duplicates"} if repeated and repeated["held_out"] else set()
    names |= {"truncated"} if lengths["truncated"]["value"] > OFTEN else set()
    lines = [line for line in lines_of(report) if line[0] in names]
    rewards = report["rewards"].items()
    useless = [name for name, of in rewards if of["mean"] is None or not of["varies"] or of["failed"]["value"]]
    return [*lines, *(("reward", of_reward(report, name)) for name in useless)]


def effect(suggestion: dict[str, Any]) -> str:
    """Return the effect of a suggestion."""
    if "fraction" not in suggestion:
        return str(suggestion["effect"])
    low, high = map(percent, suggestion["interval"])
    return f"{percent(suggestion['fraction'])} ({low} to {high}) of groups; {suggestion['effect']}"


def of_problems(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return lines about the data and the chat template."""
    count, repeated = report["counts"]["train"], report["duplicates"]
    lines = [
        ("problems", f"{count['used']} of {count['rows']} rows; {count['too_long']} with a prompt that is too long")
    ]
    unread = f"{count['unread_answer']} answers not found, {count['not_a_number']} are not numbers"
    lines.append(("answers", unread))
    if repeated:
        held_out = f"{count['held_out']} filtered because they are held out, "
        held_out += f"{repeated['held_out']} more if punctuation is ignored"
        lines.append(("duplicates", f"{held_out}; {repeated['within']} repeat another one"))
    lines.append(("template", report["chat_template"] or "none: plain prompts"))
    return lines + ([("warning", report["warning"])] if report["warning"] else [])


def passes(of: dict[str, Any]) -> str:
    """Return pass@k, of which those beyond the samples are extrapolated."""
    return ", ".join(f"@{k} {percent(estimate['value'])}" for k, estimate in of["pass@k"].items())


def of_rewards(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return lines about accuracy, rewards, and how these go together."""
    lines = []
    if accuracy := report["accuracy"]:
        lines += [("accuracy", between(accuracy)), ("pass", f"{passes(accuracy)}; above {report['samples']} by a fit")]
    lines += [("reward", of_reward(report, name)) for name in report["rewards"]]
    return lines + of_relations(report)


def of_reward(report: dict[str, Any], name: str) -> str:
    """Return the line about a reward."""
    of = report["rewards"][name]
    text = "no value on any completion" if of["mean"] is None else f"{between(of['mean'], number)}"
    if of["mean"]:
        text += f", spread {of['spread']:.3g}, {percent(of['varies'])} of problems vary"
    if of["mean"] and not of["varies"]:
        text += "; never varies within a problem"
    if of["failed"]["value"]:
        text += f"; failed on {between(of['failed'])}: {report['faults'].get(name, 'see train.log')}"
    return f"{name} {text}"


def of_relations(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return lines about rewards that contradict each other."""
    lines = []
    for contradiction in report["contradictions"]:
        degree = between(contradiction["correlation"], lambda value: f"{value:.2f}")
        lines.append(("contradict", f"{' and '.join(contradiction['rewards'])}: correlation {degree} within problems"))
    for disagreement in report["disagreements"]:
        prompt = disagreement["prompt"]
        prompt = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
        shown = " ".join(prompt.split())
        shown = shown if len(shown) <= SHORT else f"{shown[: SHORT - 1]}…"
        degree = f"rewards differ by {disagreement['apart']:.2f} of their range"
        lines.append(("disagree", f"{degree} on problem {disagreement['problem']}: {shown}"))
    return lines


def groups(report: dict[str, Any]) -> Table:
    """Return the table of sizes of a group."""
    table = Table(title="groups with non-zero variance, and effective completions in them", title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in report["groups"]:
        table.add_row(*cells(report, row))
    return table


def cells(report: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """Return a row of that table; the rows of the run and of the best size are marked."""
    low, high = map(percent, row["fraction"]["interval"])
    is_now = row["num_generations"] == report["now"]["num_generations"]
    size = f"{'best ' * row['best']}{'now ' * is_now}{row['num_generations']}"
    texts = [size, percent(row["fraction"]["value"]), f"{low} to {high}"]
    if not (prospect := row["prospect"]):
        return [*texts, "", "", "", ""]
    seconds, rate = prospect["seconds_per_step"], prospect["effective_per_second"]
    texts += [str(prospect["groups_per_step"]), f"{prospect['effective_per_step']:.1f}"]
    return texts + ([f"{seconds:.2g}", f"{rate:.3g}"] if seconds else ["", ""])


def of_completions(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return lines about lengths, endings and final answers."""
    lengths, at = report["lengths"], report["lengths"]["quantiles"]
    text = f"{lengths['mean']:.0f} on average, half up to {at['0.5']}, 90 % up to {at['0.9']}, 99 % up to {at['0.99']}"
    lines = [
        ("tokens", f"{text}; limit {lengths['limit']}"),
        ("truncated", f"{between(lengths['truncated'])}; {between(report['ended'])} ended by the policy"),
    ]
    if lengths["in_thought"]["value"]:
        lines.append(("thinking", f"{between(lengths['in_thought'])} of completions were truncated inside a thought"))
    if (shortest := lengths["shortest_limit"]) and shortest < lengths["limit"]:
        lines.append(("shortest", f"train.max_completion_length={shortest} loses at most 1 % of correct completions"))
    if places := report["answers"]:
        lines.append(("found", ", ".join(f"{name} {between(estimate)}" for name, estimate in places.items())))
    return lines


def of_rate(rates: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a line about the learning rate."""
    if not rates["steps"]:
        return [("rate", f"not tried: {rates['reason']}")]
    text = f"train.learning_rate={rates['configured']:g}"
    if suggested := rates["suggested"]:
        near = suggested / NEAR <= rates["configured"] <= suggested * NEAR
        text += f", near the suggested {suggested:.1g}" if near else f"; about {suggested:.1g} is suggested"
    for step in rates["steps"]:
        if step["rate"] == rates["configured"]:
            kl = "infinite" if step["kl"] is None else f"{step['kl']:.2g} nats per token"
            text += f"; first step: KL {kl}, better completions gain {step['gain']:.2g} nats over worse ones"
    return [("rate", text)]


def of_time(time: dict[str, Any]) -> list[tuple[str, str]]:
    """Return lines about time and cost."""
    measured = time["measured"]
    names = [
        f"{phase} {spoken(seconds)}{' (measured)' * (phase in measured)}" for phase, seconds in time["phases_s"].items()
    ]
    lines = [("phases", ", ".join(names))] if names else []
    if "step_s" in time:
        text = f"{spoken(time['step_s'])} per step, {time['steps']} steps in {spoken(time['run_s'])}"
        lines.append(("time", text + (f", cost {time['cost']:.2f}" if "cost" in time else "")))
    return lines
