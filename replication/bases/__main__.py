from replication.bases.run import main

raise SystemExit(main())
