#!/usr/bin/env bash
set -euo pipefail
pip install -r requirements.txt
converge toolchain build torchtitan-0.3.0
converge run experiment.toml
