// The page: the recording at once, then what is live.

import { watch } from "/page/watch.js";
import { chat } from "/page/chat.js";
import { race } from "/page/race.js";
import { connect } from "/page/live.js";

watch();
chat();
race();
connect();
