"""python -m starfish"""

from starfish.cli import main

if __name__ == "__main__":
    main()
