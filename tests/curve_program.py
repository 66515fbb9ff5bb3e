"""An experiment of a program that writes a curve: the control, a set like it, and a wrong one."""

import sys

PROGRAM = """
import sys
factor = float(sys.argv[2])
with open(sys.argv[1], "w") as curve:
    curve.write("step,loss\\n")
    for step in range(1, 13):
        curve.write(f"{step},{factor * 4 / step}\\n")
"""
EXPERIMENT = f"""
schema = 1
repeats = ["rerun"]
[trainer]
kind = "command"
command = ["{{python}}", "program.py", "{{output}}/curve.csv", "{{config.factor}}"]
launcher = "none"
python = "{sys.executable}"
probe = false
curves = "{{output}}/curve.csv"
[trainer.config]
factor = 1.0
training = {{ steps = 12, local_batch_size = 1 }}
[control]
name = "one"
parallelism = {{}}
[[test]]
name = "again"
parallelism = {{}}
"""
WRONG = """
[[test]]
name = "doubled"
parallelism = {}
set = { factor = 2.0 }
"""
