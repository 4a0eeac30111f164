/* Browsers start no Worker for a page that was opened from a folder. There the search's script
   runs in a hidden frame instead. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html>";
      this.inside = new Promise((started) => {
        frame.addEventListener("load", () => {
          const inside = frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const tag = inside.document.createElement("script");
          tag.src = script;
          tag.addEventListener("load", () => started(inside));
          inside.document.body.append(tag);
        });
      });
      document.documentElement.append(frame);
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
