"""The browser that tests open pages in, where there is one."""

import shutil

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
"""The first draws pages as the others do, without a window's menus, which cost half of the CPU."""
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
MISSING = f"no browser: apt-get install {NAMES[0]} (or {' or '.join(NAMES[1:])} on the PATH)"
