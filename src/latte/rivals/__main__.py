from latte.rivals.catalogue import main

raise SystemExit(main())
