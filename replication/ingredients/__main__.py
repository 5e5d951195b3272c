from replication.ingredients.run import main

raise SystemExit(main())
