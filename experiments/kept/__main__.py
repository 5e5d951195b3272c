from experiments.kept.run import main

raise SystemExit(main())
