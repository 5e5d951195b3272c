from experiments.ingredients.run import main

raise SystemExit(main())
