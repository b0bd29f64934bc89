"""A structure to turn in a browser, in HTML that loads nothing from elsewhere.

It is drawn by 3Dmol.js 2.5.5 (Rego and Koes, Bioinformatics 31, 1322, 2015; BSD-3-Clause, see
LICENSE in this folder), which a page carries whole.
"""

import html
import json
from importlib.resources import files

_START = """
(function(){
const place=document.getElementById("structure-view");
let view=null;
try{view=$3Dmol.createViewer(place,{backgroundColor:"white"});}catch(error){}
if(!view){place.textContent="WebGL is off in this browser, so nothing is drawn here; "
  +"any viewer opens the mmCIF file.";return;}
const data=JSON.parse(document.getElementById("structure-data").textContent);
view.addModel(data.text,"cif");
const bands=[[90,"#0053d6"],[70,"#65cbf3"],[50,"#ffdb13"],[-1,"#ff7d45"]];
const byConfidence=atom=>bands.find(band=>atom.b>=band[0])[1];
const chains=[...new Set(view.selectedAtoms({}).map(atom=>atom.chain))].sort();
const wheel=["#0072b2","#d55e00","#009e73","#cc79a7","#e69f00","#56b4e9","#999999","#f0e442"];
const byChain=atom=>wheel[chains.indexOf(atom.chain)%wheel.length];
function draw(colour){
  view.setStyle({},{cartoon:{colorfunc:colour}});
  const sticks={colorfunc:colour,radius:0.18},balls={colorfunc:colour,scale:0.22};
  view.setStyle({hetflag:true},{stick:sticks,sphere:balls});
  view.render();
}
// The cartoon leaves out residues whose neighbours are too far away to be bonded.
const trace=view.selectedAtoms({atom:["CA","C1'"],hetflag:false});
trace.slice(1).forEach((end,k)=>{
  const start=trace[k],far=Math.hypot(end.x-start.x,end.y-start.y,end.z-start.z);
  if(start.chain!==end.chain||far<(end.atom==="CA"?4.3:8))return;
  view.addCylinder({start,end,radius:0.12,dashed:true,dashLength:0.5,gapLength:0.5,color:"#888"});
  document.getElementById("structure-gaps").hidden=false;
});
const choice=document.getElementById("structure-colour");
choice.onchange=()=>draw(choice.value==="chain"?byChain:byConfidence);
draw(byConfidence);view.zoomTo();view.render();
})();
"""


def structure_view(mmcif: str, caption: str = "") -> str:
    """Return HTML that shows a structure, coloured by its B-factors as pLDDT or by chain.

    One page holds one view.

    Parameters
    ----------
    mmcif : the structure as text
    """
    library = files(__name__).joinpath("3Dmol-min.js").read_text(encoding="utf-8")
    # Neither `</script` nor `<!--<script` of a name may end, or never end, the element.
    data = json.dumps({"text": mmcif}).replace("<", "\\u003c")
    return (
        '<figure><label>Colour <select id="structure-colour">'
        '<option value="plddt">pLDDT: above 90, 70, 50, below</option>'
        '<option value="chain">chain</option></select></label>'
        '<div style="border:1px solid var(--line)">'  # a border of the view itself is drawn over
        '<div id="structure-view" style="position:relative;width:100%;height:560px"></div></div>'
        f"<figcaption>{html.escape(caption)}<span id='structure-gaps' hidden> Dashed: consecutive "
        "residues too far apart to be bonded.</span></figcaption></figure>"
        f'<script type="application/json" id="structure-data">{data}</script>'
        f"<script>{library}</script><script>{_START}</script>"
    )
