// Search in a folder: from file: a browser starts no Worker, so its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise((resolve) => {
        const script = inside.document.createElement("script");
        script.onload = () => resolve(inside);
        script.src = address;
        inside.document.body.append(script);
      });
    }
    postMessage(data) {
      this.loaded.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
