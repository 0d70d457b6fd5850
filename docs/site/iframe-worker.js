// Browsers start no worker for a page from a folder. Its search then runs in a hidden frame. mkdocs' plugin `offline`
// takes a script of this name in place of one from elsewhere.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      const inside = this.frame.contentWindow;
      // Later, as a worker's replies come: a page that hears one while it still sends would never hear another.
      inside.postMessage = (data) => setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })));
      const load = (source) =>
        new Promise((done, failed) => {
          const script = inside.document.createElement("script");
          script.src = new URL(source, document.baseURI);
          script.onload = done;
          script.onerror = () => failed(new Error(`${source} can't be loaded`));
          inside.document.body.append(script);
        });
      inside.importScripts = async (...sources) => {
        for (const source of sources) await load(new URL(source, new URL(url, document.baseURI)));
      };
      this.loaded = load(url);
    }

    postMessage(data) {
      const inside = this.frame.contentWindow;
      this.loaded.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
