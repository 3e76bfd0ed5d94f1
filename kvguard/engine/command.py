"""The wrapped command: `vllm serve MODEL …` understood as vLLM's own parser would understand it.

Dash and underscore spellings, `--flag=value`, unique prefixes, short aliases, repeats (the last one wins) and
`--config FILE` (expanded below the command line's own flags) are read. Nothing is changed here.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import yaml

from kvguard.facts.cli_flags import AmbiguousFlagError, FlagTable, table_for
from kvguard.facts.kv_dtypes import calculate_kv_scales_status
from kvguard.files import printable
from kvguard.vocabulary import Claim, Frozen, Source, Stage, UsageError

_NEGATIVE_NUMBER = re.compile(r"^-\d+$|^-\d*\.\d+$")
_MODULE = "vllm.entrypoints.openai.api_server"
_YAML_LIMIT = 1 << 20


class FlagUse(Frozen):
    """One use of a flag. `start`/`count` locate its tokens in argv (count 0: it came from the YAML file, as `key`)."""

    name: str
    values: tuple[str, ...]
    where: str
    source: Source
    start: int = 0
    count: int = 0
    key: str = ""


class Words(Frozen):
    """The command split into what starts vLLM and what vLLM's serve parser gets."""

    launcher: Literal["console", "module"]
    program: str
    prefix: tuple[str, ...]
    arguments: tuple[str, ...]
    subcommand: str


class Command(Frozen):
    """A parsed command. `uses` are in order of precedence, lowest first: the YAML file's, then the command line's."""

    words: Words
    version: str
    model: str
    uses: tuple[FlagUse, ...]
    config_path: str | None
    config_data: dict[str, Any] | None
    warnings: tuple[str, ...]

    def last(self, name: str) -> FlagUse | None:
        """The use of `name` that wins, or None. `--no-x` counts as a use of `--x` with the value "false"."""
        found = None
        for use in self.uses:
            if use.name == name:
                found = use
            elif name.startswith("--") and use.name == "--no-" + name[2:]:
                found = use.model_copy(update={"values": ("false",)})
        return found

    def value(self, name: str) -> str | None:
        """The winning value of a one-valued flag."""
        use = self.last(name)
        return use.values[-1] if use and use.values else None

    def values(self, name: str) -> tuple[str, ...]:
        """All values of the winning use of a list flag."""
        use = self.last(name)
        return use.values if use else ()

    def collected(self, name: str) -> tuple[str, ...]:
        """Values of every use, for flags that accumulate."""
        return tuple(value for use in self.uses if use.name == name for value in use.values)

    def present(self, name: str) -> bool:
        """Whether a flag is on."""
        use = self.last(name)
        return use is not None and use.values != ("false",)

    def json_object(self, name: str) -> dict[str, Any] | None:
        """The object a JSON flag gives, None when it is not used. Raises UsageError for anything but an object.

        Dotted uses (`--hf-overrides.a.b 1`) are merged, and replace the plain one, because vLLM puts their object
        after it (0.32.0 utils/argparse_utils.py:461).
        """
        dotted = [use for use in self.uses if use.name.startswith(name + ".")]
        if dotted:
            merged: dict[str, Any] = {}
            for use in dotted:
                _put(merged, use.name.removeprefix(name + ".").split("."), use.values[0])
            return merged
        plain = self.last(name)
        if plain is None or not plain.values:
            return None
        try:
            parsed = json.loads(plain.values[-1])
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{plain.where}: {name} needs a JSON object: {error}") from error
        if not isinstance(parsed, dict):
            raise UsageError(f"{plain.where}: {name} needs a JSON object, found {type(parsed).__name__}")
        return parsed


def as_int(text: str | None) -> int | None:
    """A flag's value as Python's int() reads it, as argparse does; None for anything else."""
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def _put(target: dict[str, Any], keys: list[str], text: str) -> None:
    """Set one dotted key, with vLLM's rules: values are JSON or text, objects merge, `key+` appends to a list."""
    appends = keys[-1].endswith("+")
    *parents, last = [*keys[:-1], keys[-1].removesuffix("+")]
    for key in parents:
        inner = target.get(key)
        target[key] = inner if isinstance(inner, dict) else {}
        target = target[key]
    value: Any = text
    if appends:
        value = text.split(",")
    else:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(text)
    if isinstance(value, list) and isinstance(target.get(last), list):
        value = target[last] + value
    target[last] = value


def split_words(argv: Sequence[str]) -> Words:
    """Find vLLM in the command. Raises UsageError for a command that is not vLLM's server."""
    if not argv:
        raise UsageError("no engine command: write it after `--`, for example: kvguard serve -- vllm serve MODEL")
    program = argv[0]
    base = program.rsplit("/", 1)[-1]
    if base == "vllm":
        subcommand = argv[1] if len(argv) > 1 else ""
        return Words(
            launcher="console",
            program=program,
            prefix=tuple(argv[:2]),
            arguments=tuple(argv[2:]),
            subcommand=subcommand,
        )
    if base.startswith("python") and "-m" in argv:
        at = list(argv).index("-m")
        if len(argv) > at + 1 and argv[at + 1] == _MODULE:
            return Words(
                launcher="module",
                program=program,
                prefix=tuple(argv[: at + 2]),
                arguments=tuple(argv[at + 2 :]),
                subcommand="serve",
            )
    raise UsageError(
        f"engine command begins with {program!r}: required is `vllm serve …`, a path to vllm, or `python -m {_MODULE} …`; "
        "put wrappers such as env or numactl before kvguard instead"
    )


def parse_command(words: Words, version: str, read: Callable[[str], bytes]) -> Command:
    """Parse `words` with the flags of `version`; `read(path)` returns the bytes of the `--config` file.

    Raises UsageError where vLLM's own parser would exit 2: unknown or ambiguous flag, missing value, a
    `--config` file that is no YAML mapping.
    """
    table = table_for(version)
    warnings: list[str] = []
    if not table.exact:
        warnings.append(
            f"vLLM {version or 'of unknown version'}: its parser was not read in full; a flag that the facts do not list "
            "is passed on unchecked"
        )
    positionals: list[tuple[int, str]] = []
    line_uses: list[FlagUse] = []
    for item in _scan(words.arguments, table):
        if isinstance(item, FlagUse):
            line_uses.append(item)
        else:
            positionals.append(item)
    config_path, config_data, yaml_uses = None, None, []
    for use in line_uses:
        if use.name != "--config":
            continue
        if use.count == 1:
            warnings.append(f"{use.where}: vLLM silently ignores --config=FILE; only `--config FILE` with a space is read")
        elif config_path is not None:
            raise UsageError(f"{use.where}: a second --config; vLLM reads one file and exits on two")
        else:
            config_path = use.values[0]
            config_data = _load_yaml(config_path, read)
            yaml_uses = list(_yaml_uses(config_path, config_data, table))
    uses = (*yaml_uses, *line_uses)
    command = Command(
        words=words,
        version=version,
        model="",
        uses=uses,
        config_path=config_path,
        config_data=config_data,
        warnings=tuple(warnings),
    )
    if calculate_kv_scales_status(version) == "deprecated" and command.present("--calculate-kv-scales"):
        warnings.append(
            "--calculate-kv-scales is deprecated and gone from 0.28.0 on; the first batch the engine runs, which may be a "
            "dummy, fixes every scale for good"
        )
        command = command.model_copy(update={"warnings": tuple(warnings)})
    if len(positionals) > 1 or (positionals and words.launcher == "module"):
        index, extra = positionals[-1]
        raise UsageError(f"argument {index + 1} {extra!r}: vLLM takes one model and flags; it would reject this word")
    model = positionals[0][1] if positionals else (command.value("--model") or _yaml_model(config_data) or "")
    if not model:
        raise UsageError("no model in the engine command: write it after `vllm serve`, or as --model")
    return command.model_copy(update={"model": model})


def _scan(arguments: Sequence[str], table: FlagTable) -> Iterator[FlagUse | tuple[int, str]]:
    """Flags with their values, and positional words with their index, in order."""
    index = 0
    while index < len(arguments):
        token = arguments[index]
        if not _is_flag(token):
            yield index, token
            index += 1
            continue
        spelled, equals, attached = token.partition("=")
        where = f"argument {index + 1} `{printable(token if len(token) < 80 else spelled)}`"
        name, nargs = _resolve(spelled, where, table)
        following = 0
        while index + 1 + following < len(arguments) and not _is_flag(arguments[index + 1 + following]):
            following += 1
        if equals:
            taken = 0
            values: tuple[str, ...] = (attached,)
        else:
            taken = {"0": 0, "1": min(1, following), "?": min(1, following), "+": following, "*": following}.get(nargs, 0)
            values = tuple(arguments[index + 1 : index + 1 + taken])
            if taken == 0 and nargs in ("1", "+"):
                raise UsageError(f"{where}: vLLM's {printable(name)} expects a value")
        yield FlagUse(name=name, values=values, where=where, source=Source.COMMAND_LINE, start=index, count=1 + taken)
        index += 1 + taken


def _is_flag(token: str) -> bool:
    return token.startswith("-") and token != "-" and not _NEGATIVE_NUMBER.match(token)


def _resolve(spelled: str, where: str, table: FlagTable) -> tuple[str, str]:
    """Full name and number of values of a flag as spelled."""
    if re.match(r"^-O\d?$", spelled):  # -O3, -O 3: the optimization level
        return "--optimization-level", "0" if len(spelled) > 2 else "1"
    short = re.match(r"^(-[a-z]+)\.", spelled)
    if short and short.group(1) in table.short:
        return table.short[short.group(1)] + spelled[short.end() - 1 :], "1"
    gone = table.removed.get(spelled.replace("_", "-"))
    if gone is not None:
        raise UsageError(f"{where}: vLLM would exit: {gone}")
    try:
        name = table.resolve(spelled)
    except AmbiguousFlagError as error:
        verdict = f"vLLM {table.version} would reject it" if table.exact else "write the flag in full"
        raise UsageError(f"{where}: ambiguous, {printable(str(error))}; {verdict}") from error
    if name is None:
        if table.exact:
            near = table.suggestion(spelled)
            raise UsageError(
                f"{where}: vLLM {table.version} has no such flag and would exit" + (f"; did you mean {near}?" if near else "")
            )
        return spelled.replace("_", "-") if spelled.startswith("--") else spelled, "*"
    nargs = table.nargs.get(name, "1")  # dotted JSON flags take one value
    return name, nargs


def _load_yaml(path: str, read: Callable[[str], bytes]) -> dict[str, Any]:
    name = printable(path)
    if path.rpartition(".")[2] not in ("yaml", "yml"):
        raise UsageError(f"--config {name}: vLLM reads files named .yaml or .yml only")
    data = read(path)
    if len(data) > _YAML_LIMIT:
        raise UsageError(f"{name}: {len(data)} bytes; a vLLM --config file of more than 1 MiB is not read")
    try:
        parsed = yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise UsageError(f"{name}{place}: not valid YAML: {problem}") from error
    if not isinstance(parsed, dict) or not all(isinstance(key, str) for key in parsed):
        raise UsageError(f"{name}: a vLLM --config file must be a mapping of flag names to values")
    return parsed


def _yaml_uses(path: str, data: dict[str, Any], table: FlagTable) -> Iterator[FlagUse]:
    """The file's keys as flag uses, as vLLM expands them (true: bare flag; false: off; maps: JSON)."""
    for key, value in data.items():
        where = f"{printable(path)}: {printable(key)}"
        if key in ("model", "model_tag"):
            continue
        name, _ = _resolve("--" + key, where, table)
        if value is True:
            values: tuple[str, ...] = ()
        elif value is False:
            values = ("false",)
        elif isinstance(value, list):
            values = tuple(_scalar(item) for item in value)
        else:
            values = (_scalar(value),)
        yield FlagUse(name=name, values=values, where=where, source=Source.CONFIG_YAML, key=key)


def _scalar(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _yaml_model(data: dict[str, Any] | None) -> str | None:
    for key in ("model", "model_tag"):
        if data and isinstance(data.get(key), str):
            return str(data[key])
    return None


def requested_claims(command: Command) -> tuple[Claim, ...]:
    """What the command asks for about the KV cache, each with where it was written."""
    fields = {
        "--kv-cache-dtype": "kv_cache_dtype",
        "--calculate-kv-scales": "calculate_kv_scales",
        "--kv-cache-dtype-skip-layers": "skip_layers",
        "--dtype": "model_dtype",
        "--quantization": "quantization",
        "--attention-backend": "attention_backend",
        "--hf-overrides": "hf_overrides",
        "--speculative-config": "speculative_config",
        "--additional-config": "additional_config",
        "--block-size": "block_size",
        "--max-model-len": "max_model_len",
        "--max-num-seqs": "max_num_seqs",
        "--enforce-eager": "enforce_eager",
        "--tensor-parallel-size": "tensor_parallel_size",
    }
    claims = []
    for flag, field in fields.items():
        use = command.last(flag)
        if use is None:
            continue
        value: Any = list(use.values) if len(use.values) > 1 else (use.values[0] if use.values else True)
        claims.append(Claim(stage=Stage.REQUESTED, source=use.source, field=field, value=value, where=use.where))
    if command.last("--kv-cache-dtype") is None:
        claims.append(
            Claim(
                stage=Stage.REQUESTED,
                source=Source.COMMAND_LINE,
                field="kv_cache_dtype",
                value=None,
                where="command line, YAML",
                note="nothing typed",
            )
        )
    return tuple(claims)
