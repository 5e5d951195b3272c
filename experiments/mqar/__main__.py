from experiments.mqar.run import main

raise SystemExit(main())
