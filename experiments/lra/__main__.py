from experiments.lra.run import main

raise SystemExit(main())
