from experiments.probes.run import main

raise SystemExit(main())
