#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "$0")"
python -c 'import converge_harness' || pip install -r requirements.txt
converge toolchain build torchtitan-0.2.2
converge run experiment.toml
