from replication.lra.run import main

raise SystemExit(main())
