from experiments.bases.run import main

raise SystemExit(main())
