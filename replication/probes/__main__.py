from replication.probes.run import main

raise SystemExit(main())
