from replication.mqar.run import main

raise SystemExit(main())
