"""The configuration: precedence, every refusal names its setting and the remedy, sizes, flags."""

from __future__ import annotations

import grp
import itertools
import json
import os
import pwd
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from colibri_daemon.common.declaration import SETTINGS, Setting, Settings
from colibri_daemon.common.settings import SettingsError, click_options, load_settings
from colibri_daemon.common.values import format_size, parse_size
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError

# One acceptable value of each kind of setting besides the default.
SAMPLES: dict[str, Any] = {"size": 1 << 20, "mode": 0o600, "chunk": 128, "auto": 64, "text": "staff",
                           "uids": (0, 1000), "gids": (0, 1000), "int": 16, "float": 2.5, "bool": True,
                           "path": Path("/srv/x"),
                           "address": "[::1]:9464"}  # fmt: skip
# Values each kind refuses, as text. Every name may be a group's.
WRONG: dict[str, tuple[str, ...]] = {
    "size": ("-1", "1.5X", "G", "0x10", "1e6", "99999T"),
    "mode": ("668", "1777", "-rw", "6600", "0b11"),
    "chunk": ("7", "513", "-8", "many"),
    "auto": ("-1", "none", "1.5", "99999999"),
    "uids": ("-1", "no-such-user", "1;2", "4294967295"),
    "gids": ("-1", "no-such-group", "1;2", "4294967295"),
    "int": ("-1", "1.5", "2x", "99999999999", "٣x"),
    "float": ("-1", "nan", "inf", "soon", "1e9"),
    "bool": ("2", "maybe"),
    "choice": ("", "bogus"),
    "path": ("a\0b",),
    "address": ("9464", "localhost:9464", "127.0.0.1", "127.0.0.1:0", "1.2.3.4:65536", "::1:9464", "[1.2.3.4]:9",
                "unix:"),
}

UNKNOWN = {"uids": "user", "gids": "group"}


def write(folder: Path, content: str) -> Path:
    path = folder / "colibrid.toml"
    path.write_text(content, encoding="utf-8")
    return path


def problems(flags: dict[str, Any], environ: dict[str, str], file: Path | None = None) -> list[str]:
    with pytest.raises(SettingsError) as refused:
        load_settings(flags, environ, file)
    assert str(refused.value) == "\n".join(refused.value.problems)
    return refused.value.problems


def sample(setting: Setting) -> Any:
    return setting.choices[-1] if setting.choices else SAMPLES[setting.kind]


# ---- precedence ----------------------------------------------------------------------------------------------------
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "workers": st.integers(1, 256),
    "kv_bytes": st.integers(0, 1 << 50),
    "trusted_uids": st.lists(st.integers(0, (1 << 32) - 2), max_size=4).map(tuple),
    "socket": st.from_regex(r"/[a-z0-9 ./_é-]{1,40}", fullmatch=True).map(Path),
    "verify": st.booleans(),
    "window": st.none() | st.integers(0, 1 << 24),
    "hang_seconds": st.floats(1, 3600),
    "kv_format": st.sampled_from(("auto", "f16", "f32")),
    "socket_mode": st.integers(0, 0o777),
}
PARTS = st.fixed_dictionaries({}, optional=VALUES)


@given(flags=PARTS, environ=PARTS, file=PARTS)
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_strongest_source_that_has_a_value_wins(
    tmp_path: Path, flags: dict[str, Any], environ: dict[str, Any], file: dict[str, Any]
) -> None:
    """Each source in its own written form, so this also shows that every form reads back to the value."""
    document = write(tmp_path, "".join(f"{name} = {SETTINGS[name].toml(value)}\n" for name, value in file.items()))
    variables = {SETTINGS[name].variable: SETTINGS[name].text(value) for name, value in environ.items()}
    options = {name: SETTINGS[name].text(value) for name, value in flags.items()}
    loaded = load_settings(options, variables, document)
    said_nothing = {name for name, value in environ.items() if not SETTINGS[name].text(value)}  # empty = not set
    for name in VALUES:
        if name in flags:
            expected, origin = flags[name], SETTINGS[name].flag
        elif name in environ and name not in said_nothing:
            expected, origin = environ[name], SETTINGS[name].variable
        elif name in file:
            expected, origin = file[name], f"{document}:{list(file).index(name) + 1}"
        else:
            expected, origin = SETTINGS[name].default, "default"
        assert (name, getattr(loaded, name), loaded.origin(name)) == (name, expected, origin)
    assert loaded.warnings == ()


def test_the_file_comes_from_the_environment_unless_given(tmp_path: Path) -> None:
    first, second = write(tmp_path, "workers = 2"), tmp_path / "second.toml"
    second.write_text("workers = 3")
    assert load_settings({}, {"COLIBRI_CONFIG": str(first)}).workers == 2
    assert load_settings({}, {"COLIBRI_CONFIG": str(first)}, second).workers == 3
    assert load_settings({}, {"COLIBRI_CONFIG": ""}).workers == 1


def test_flags_may_have_pythons_types_and_none_is_not_given() -> None:
    loaded = load_settings({"workers": 2, "socket": Path("/x"), "trusted_uids": [5], "verify": None}, {})
    assert (loaded.workers, loaded.socket, loaded.trusted_uids, loaded.verify) == (2, Path("/x"), (5,), False)


# ---- refusals ------------------------------------------------------------------------------------------------------
WRONG_PAIRS = [
    pytest.param(setting, text, id=f"{setting.name}={text}")
    for setting in SETTINGS.values()
    for text in WRONG.get("choice" if setting.choices else setting.kind, ())
]


def test_every_kind_has_wrong_values() -> None:
    assert {setting.kind for setting in SETTINGS.values()} - WRONG.keys() == {"text"}


@pytest.mark.parametrize(("setting", "wrong"), WRONG_PAIRS)
def test_a_wrong_value_is_refused_with_name_place_and_remedy(tmp_path: Path, setting: Setting, wrong: str) -> None:
    must = f"must be {setting.allowed}"
    if setting.kind in UNKNOWN and not wrong.strip("-").isdigit():
        must = f"there is no {UNKNOWN[setting.kind]} {wrong!r}; {must}"
    assert problems({setting.name: wrong}, {}) == [f"{setting.flag}: {setting.name} = {wrong!r}: {must}"]
    if wrong and "\0" not in wrong:
        expected = f"{setting.variable}: {setting.name} = {wrong!r}: {must}"
        assert problems({}, {setting.variable: wrong}) == [expected]
    path = write(tmp_path, f"# a comment\n{setting.name} = {json.dumps(wrong)}\n")
    shown = json.dumps(wrong, ensure_ascii=False)
    assert problems({}, {}, path) == [f"{path}:2: {setting.name} = {shown}: {must}"]


@pytest.mark.parametrize(("line", "shown"), [
    ("workers = true", "true"),
    ('workers = "2"', '"2"'),
    ("workers = 2.0", "2.0"),
    ("workers = 2024-01-01", '"2024-01-01"'),
    ("verify = 1", "1"),
    ('verify = "true"', '"true"'),
    ("socket_mode = 660", "660"),
    ("socket_mode = 0o660", "432"),
    ("hang_seconds = nan", "NaN"),
    ('trusted_uids = ["0"]', '["0"]'),
    ("trusted_uids = [true]", "[true]"),
    ("model = 5", "5"),
    ("model = ['a']", '["a"]'),
])  # fmt: skip
def test_a_files_values_have_types(tmp_path: Path, line: str, shown: str) -> None:
    """Text is read as a number only where there is nothing but text."""
    name = line.split()[0]
    path = write(tmp_path, line)
    assert problems({}, {}, path) == [f"{path}:1: {name} = {shown}: must be {SETTINGS[name].allowed}"]


def test_names_of_users_and_groups_are_looked_up(tmp_path: Path) -> None:
    user, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name
    path = write(tmp_path, f'trusted_uids = [77, "{user}"]\nallowed_gids = ["{group}"]\n')
    loaded = load_settings({"allowed_uids": f"{user}, 5"}, {}, path)
    assert (loaded.trusted_uids, loaded.allowed_uids) == ((77, os.getuid()), (os.getuid(), 5))
    assert loaded.allowed_gids == (os.getgid(),)


def test_a_name_that_is_gone_at_a_reload_is_a_problem_of_its_field(tmp_path: Path) -> None:
    path = write(tmp_path, "trusted_uids = [1]\n")
    loaded = load_settings({}, {}, path)
    write(tmp_path, '\ntrusted_uids = [1, "no-such-user"]\n')
    with pytest.raises(SettingsError) as refused:
        loaded.again()
    (problem,) = refused.value.problems
    shown = f'{path}:2: trusted_uids = [1, "no-such-user"]: '
    assert problem.startswith(shown + "there is no user 'no-such-user'; must be users' names or numbers")


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, 'workers = 0\nworker = 2\nmax_seqs = 8\n"log_level" = "loud"\n')
    found = problems({"threads": "x", "bogus": 1}, {"COLIBRI_SLAB_TOKENS": "17"}, path)
    assert len(found) == 6
    for number, name in ((1, "workers = 0"), (2, 'unknown key "worker"'), (4, 'log_level = "loud"')):
        assert any(problem.startswith(f"{path}:{number}: {name}") for problem in found)
    for start in ("COLIBRI_SLAB_TOKENS: slab_tokens = '17': must be a multiple of 16", "--threads: threads = 'x'"):
        assert any(problem.startswith(start) for problem in found)


def test_a_refused_value_is_refused_where_a_stronger_one_stands_too(tmp_path: Path) -> None:
    assert problems({"workers": "2"}, {}, write(tmp_path, "workers = 0"))


@pytest.mark.parametrize(("key", "near"), [("worker", "workers"), ("max-seqs", "max_seqs"), ("kvbytes", "kv_bytes")])
def test_an_unknown_key_suggests_the_nearest(tmp_path: Path, key: str, near: str) -> None:
    path = write(tmp_path, f"\n{key} = 2\n")
    assert problems({}, {}, path) == [f'{path}:2: unknown key "{key}"; did you mean "{near}"?']
    assert problems({key: 2}, {}) == [f'unknown setting "{key}"; did you mean "{near}"?']


def test_an_unknown_key_without_a_near_one_points_to_the_list(tmp_path: Path) -> None:
    assert "config-reference" in problems({}, {}, write(tmp_path, "zzz = 1"))[0]


def test_sections_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "workers = 2\n[memory]\nkv_bytes = 0\n")
    assert problems({}, {}, path) == [f"{path}:2: [memory]: settings have no sections; write key = value lines only"]


@pytest.mark.parametrize(("content", "part"), [
    (b"workers = = 2", "line 1"),
    (b"workers = 1\nworkers = 2\n", "line 2"),
    (b"\xff\xfe", "utf-8"),
    (b"a = " + b"[" * 100_000, "recursion"),
    (b"#" * (1 << 20) + b"#", "no configuration"),
])  # fmt: skip
def test_what_is_no_toml_is_refused(tmp_path: Path, content: bytes, part: str) -> None:
    path = tmp_path / "colibrid.toml"
    path.write_bytes(content)
    (found,) = problems({}, {}, path)
    assert found.startswith(f"{path}: ")
    assert part in found


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert problems({}, {}, tmp_path / "none") == [f"{tmp_path}/none: cannot be read: No such file or directory"]
    assert "Is a directory" in problems({}, {}, tmp_path)[0]


def test_unknown_variables_warn(tmp_path: Path) -> None:
    environ = {"COLIBRI_WORKER": "2", "COLIBRI_PORT_80_TCP": "x", "COLIBRI_ISA": "ref", "COLIBRI_LIBRARY_DIR": "/",
               "COLIBRI_CONFIG": str(write(tmp_path, "")), "PATH": "/bin", "colibri_x": "1"}  # fmt: skip
    first, second = load_settings({}, environ).warnings
    assert first == 'COLIBRI_WORKER is set but is no setting; did you mean "COLIBRI_WORKERS"?'
    assert second.startswith("COLIBRI_PORT_80_TCP is set but is no setting; ")


def test_settings_that_do_not_agree(tmp_path: Path) -> None:
    """Told with the place of each, and only once everything is put together."""
    path = write(tmp_path, "pinned = 4\nwindow = 0")
    (found,) = problems({}, {}, path)
    assert found.startswith(f"{path}:1, {path}:2: pinned = 4 with window = 0")
    assert load_settings({"window": 8}, {}, path).window == 8
    assert load_settings({"window": "auto"}, {}, path).pinned == 4
    (found,) = problems({"socket": "/" + "é" * 54}, {})
    assert found == "--socket: socket has 109 bytes; a Unix socket's path has at most 107"
    with pytest.raises(ValidationError, match="window"):
        Settings(pinned=4, window=0)


def test_the_socket_needs_a_path() -> None:
    assert problems({"socket": ""}, {}) == ["--socket: socket = '': must be a path of at most 107 bytes"]
    assert load_settings({"model": "", "socket_group": ""}, {}).model is None


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_settings({}, {}).workers = 2
    with pytest.raises(ValidationError, match="Extra inputs"):
        Settings(worker=2)


# ---- sizes and what follows from settings --------------------------------------------------------------------------
@pytest.mark.parametrize(("text", "size"), [
    ("512M", 512 << 20), ("4G", 4 << 30), ("1.5GiB", 3 << 29), ("1 kB", 1000), ("2MB", 2_000_000), ("1k", 1024),
    ("1048576", 1 << 20), ("12B", 12), ("0", 0), ("0.3K", 307), (" 1T ", 1 << 40), ("1gib", 1 << 30),
    ("3mb", 3_000_000),
])  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@given(st.integers(0, 1 << 60) | st.builds(lambda n, p: n << 10 * p, st.integers(0, 2048), st.integers(0, 4)))
def test_a_size_reads_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    try:
        size = parse_size(text)
    except ValueError:
        size = 0
    assert 0 <= size < 10**20 << 40


def test_what_follows() -> None:
    assert Settings(workers=2, max_seqs=8).queue_limit == 64
    assert Settings(queue_requests=3).queue_limit == 3
    assert [Settings(workers=3).threads_per_worker(cores) for cores in (1, 3, 8)] == [1, 1, 2]
    assert Settings(workers=3, threads=5).threads_per_worker(1) == 5


# ---- flags ---------------------------------------------------------------------------------------------------------
@click.command()
@click.option("--extra", is_flag=True)
@click_options
@click.argument("word", default="none")
def command(settings: Settings, extra: bool, word: str) -> None:
    click.echo(f"{settings.workers} {settings.origin('workers')} {settings.verify} {settings.kv_bytes} {extra} {word}")


def run(*arguments: str, **environ: str) -> Any:
    clean = {name: None for name in os.environ if name.startswith("COLIBRI_")}
    return CliRunner().invoke(command, arguments, env=clean | environ)


def test_flags_reach_the_command_beside_its_own(tmp_path: Path) -> None:
    path = write(tmp_path, 'workers = 2\nverify = true\nkv_bytes = "1M"')
    assert run("--config", str(path), "--extra", "x").stdout == f"2 {path}:1 True 1048576 True x\n"
    result = run("--config", str(path), "--workers", "4", "--no-verify", COLIBRI_KV_BYTES="2K", COLIBRI_WORKERS="3")
    assert result.stdout == "4 --workers False 2048 False none\n"
    assert run(COLIBRI_CONFIG=str(path)).stdout.startswith("2 ")


def test_problems_go_to_stderr_with_exit_code_2() -> None:
    result = run("--workers", "0", "--kv-bytes", "much")
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(r"error: --workers: .*\nerror: --kv-bytes: .*\n", result.stderr)
    assert run("--log-level", "loud").exit_code == 2


def test_help_shows_every_setting_with_variable_and_default() -> None:
    shown = " ".join(run("--help").stdout.split())
    for setting in SETTINGS.values():
        assert f"{setting.flag} " in shown
        assert setting.help in shown
        default = f"; default: {text}" if (text := setting.text(setting.default)) else ""
        assert f"[env: {setting.variable}{default}]" in shown


# ---- generated files -----------------------------------------------------------------------------------------------
def test_sections_are_contiguous() -> None:
    names = [section for section, _ in itertools.groupby(SETTINGS.values(), lambda setting: setting.section)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.name)
def test_every_setting_can_be_set_from_everywhere(tmp_path: Path, setting: Setting) -> None:
    value = sample(setting)
    path = write(tmp_path, f"{setting.name} = {setting.toml(value)}")
    for loaded in (
        load_settings({setting.name: setting.text(value)}, {}),
        load_settings({setting.name: value}, {}),
        load_settings({}, {setting.variable: setting.text(value)}),
        load_settings({}, {}, path),
    ):
        assert getattr(loaded, setting.name) == value
        assert loaded.origin(setting.name) != "default"


# ---- the admin socket ----------------------------------------------------------------------------------------------


def test_the_admin_socket_is_beside_the_other_unless_it_is_named():
    assert Settings(socket="/run/c/s").admin_path == Path("/run/c/s.admin")
    assert Settings(socket="/run/c/s", admin_socket="/tmp/a").admin_path == Path("/tmp/a")
    assert Settings(admin_socket="").admin_path == Path("/run/colibri/colibri.sock.admin")


def test_admin_sockets_that_cannot_be():
    (found,) = problems({"socket": "/" + "x" * 105}, {})
    assert "admin_socket, /" + "x" * 105 + ".admin, has 112 bytes" in found
    assert load_settings({"socket": "/" + "x" * 105, "admin_socket": "/a"}, {}).admin_path == Path("/a")
    (found,) = problems({"socket": "/a", "admin_socket": "/a"}, {})
    assert "are the same path" in found
