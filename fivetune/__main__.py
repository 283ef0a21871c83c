"""python -m fivetune"""

from fivetune.cli import main

raise SystemExit(main())
