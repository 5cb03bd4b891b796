"""python -m colibri_engine.bench"""

from . import main

main()
