"""What is made of pip's settings and of an installer's words."""

import subprocess
import sys

import pytest

from converge_harness.toolchains import installer

TOLD = """:env:.find-links='/wheels/of env'
:env:.timeout='180'
global.cert='/etc/ca.crt'
global.extra-index-url='https://one.example/simple https://two.example/simple'
global.find-links='/wheels/of/file'
install.extra-index-url='https://three.example/simple'
download.find-links='/of/another/command'
"""


def test_pips_environment_counts_more_than_its_files_and_install_more_than_global():
    assert installer.pip_settings(TOLD) == {
        "cert": "/etc/ca.crt",
        "extra-index-url": "https://three.example/simple",
        "find-links": "/wheels/of env",
        "timeout": "180",
    }
    assert installer.pip_settings("") == {}


def test_uv_looks_where_pip_looks():
    options, environment = installer.uv_settings(
        {
            "index-url": "https://main.example/simple",
            "extra-index-url": "https://one.example/simple\nhttps://two.example/simple",
            "find-links": "/wheels",
            "no-index": "true",
            "trusted-host": "one.example",
            "cert": "/etc/ca.crt",
            "proxy": "http://proxy.example:3128",
        }
    )
    assert options == [
        "--index-url=https://main.example/simple",
        "--extra-index-url=https://one.example/simple",
        "--extra-index-url=https://two.example/simple",
        "--find-links=/wheels",
        "--index-strategy=unsafe-best-match",
        "--no-index",
        "--allow-insecure-host=one.example",
    ]
    assert environment == {
        "SSL_CERT_FILE": "/etc/ca.crt",
        "HTTP_PROXY": "http://proxy.example:3128",
        "HTTPS_PROXY": "http://proxy.example:3128",
    }


def test_without_settings_of_pips_uv_has_its_own():
    assert installer.uv_settings({}) == (["--index-strategy=unsafe-best-match"], {})
    assert "--no-index" not in installer.uv_settings({"no-index": "false"})[0]


NO_VERSION = """
error: No solution found when resolving dependencies
  cause: Because there is no version of torch==9.9.9 and you require torch==9.9.9, we can conclude \
that your requirements are unsatisfiable.
""".replace("\\\n", "")
OF_PIP = "Collecting x\nERROR: No matching distribution found for x\nWARNING: more\n"


@pytest.mark.parametrize(
    ("log", "told"),
    [
        (
            NO_VERSION,
            NO_VERSION.strip().replace("\n  cause:", ":"),
        ),
        (
            "warning: x\nerror: Request failed after 3 retries\n",
            "error: Request failed after 3 retries",
        ),
        (OF_PIP, "ERROR: No matching distribution found for x"),
        ("building\nkilled\n\n", "killed"),
        ("", "the installer said nothing"),
    ],
)
def test_the_reason_of_a_build_that_failed_is_one_line(log, told):
    assert installer.first_error(log) == told


def test_uvs_own_words_are_understood(tmp_path):
    """What uv says of a package that is nowhere, asked without any index."""
    uv = (sys.executable, "-m", "uv")
    made = [*uv, "venv", "--quiet", "--python", sys.executable, str(tmp_path / "v")]
    subprocess.run(made, check=True, timeout=60)
    python = str(tmp_path / "v" / "bin" / "python")
    asked = [*uv, "pip", "install", "--quiet", "--no-index", "--python", python, "no-such-package"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode
    told = installer.first_error(done.stdout + done.stderr)
    assert told.startswith("error: No solution found")
    assert "no-such-package was not found" in told


def test_only_pip_installs_what_asks_for_a_newer_python(tmp_path):
    """The metadata of Megatron-Core 0.17 ask for 3.12, beside its files for 3.11."""
    here, newer = sys.version_info[:2], (sys.version_info[0], sys.version_info[1] + 1)
    uv = installer.Installer("uv", ("uv", "venv"), ("uv", "pip", "install"), ("--no-index",))
    pip = installer.Installer("pip", ("python", "-m", "venv"), ("other", "-m", "pip"))
    python = tmp_path / "python"
    assert uv.install(python, "x", declared=here)[:3] == ("uv", "pip", "install")
    command = uv.install(python, "x", declared=newer)
    assert command[:3] == (sys.executable, "-m", "pip")
    assert command[-2:] == ("--ignore-requires-python", "x")
    assert pip.install(python, "x", declared=newer)[:3] == ("other", "-m", "pip")
    assert "--ignore-requires-python" not in pip.install(python, "x", declared=here)
